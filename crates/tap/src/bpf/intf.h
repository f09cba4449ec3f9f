/*
 * The contract between the BPF programs and Rust: every layout and constant that both sides must
 * agree on, and nothing else. The Rust definitions are generated from this file when the crate is
 * built (build.rs), and crates/tap/src/intf.rs names every field. No structure may have padding:
 * that fails to compile in Rust.
 *
 * All numbers are little-endian and naturally aligned, as both sides run on the same x86-64
 * machine.
 */
#ifndef TAP_INTF_H
#define TAP_INTF_H

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TAP_PAGE_SIZE 4096

/* The largest folio of a page cache on x86-64 is a PMD: order 9. A larger one is not expected; it is counted, not read. */
#define TAP_FOLIO_PAGES_MAX 512

/* One page that reclaim evicted. It is a record of the ring by itself if the page's bytes are omitted. */
struct tap_head {
	u32 generation; /* i_generation of the page's inode */
	u32 cgroup;     /* lower half of the number of the control group that it was charged to; 0: unknown, or not requested */
	u64 inode;      /* i_ino of the page's inode */
	u64 index;      /* the page's index in the file */
};

/* A record of the ring with the page's bytes. */
struct tap_event {
	struct tap_head head;
	u8 page[TAP_PAGE_SIZE];
};

/*
 * Pages whose bytes the consumer does not need. The table has one place for each page, which holds
 * the page's fingerprint unless another page has taken the place. 0: none. A line, of the size of a
 * cache line, is for neighbours in a file. (generation << 32 | index) / 16 is multiplied: the
 * highest bits are the number of the line, and the lower half, made odd, is the fingerprint of its
 * pages.
 */
#define SKIP_LIST_LINE_PAGES 16
#define SKIP_LIST_MULTIPLIER 0x9e3779b97f4a7c15ULL
struct skip_list_line {
	u32 fingerprints[SKIP_LIST_LINE_PAGES];
};

/* One record of the other ring: consecutive pages that were added to the page cache. */
struct tap_added {
	u32 generation;
	u32 pages;
	u64 inode;
	u64 index; /* of the first */
};

/* The tap's configuration, set before it is loaded (.rodata). */
struct tap_config {
	u64 vmemmap_base; /* address of the struct page of pfn 0 */
	u64 linear_base;  /* address of the byte at physical address 0 */
	u32 device;       /* s_dev of the file system that is tapped: major << 20 | minor */
	u32 tells_cgroup; /* 0: the control groups of pages are not needed */
	u64 skip_list_shift; /* 64 less the bits of a line's number in the skip list */
};

/*
 * Shared while the tap runs (.bss, mapped by the consumer). The consumer writes 1 before it sleeps.
 * The program that puts the next page into the ring resets it to 0 and wakes the consumer.
 */
struct tap_shared {
	u32 consumer_sleeps;
};

/* Counts since the tap was attached; one such struct per CPU. All but the folios are in pages. */
struct tap_counters {
	u64 captured;
	u64 ring_full;
	u64 invalidated;
	u64 unreadable;
	u64 large_folios; /* folios of more than one page that were captured, in part or whole */
	u64 omitted;      /* captured without their bytes */
};

/* File systems that are watched at once. */
#define TRACE_DEVICES 8

/* The access trace's configuration, set before it is loaded (.rodata). */
struct trace_config {
	u32 devices[TRACE_DEVICES]; /* s_dev of each; unused ones 0 */
};

/* Shared while it runs (.bss). */
struct trace_shared {
	u32 unused;
	u32 reserved;
	u64 threshold; /* pages whose hash is below it are reported one by one; 1 << 32: all */
};

enum trace_kind {
	TRACE_ADDED = 1,   /* pages were added to the page cache; reported for all, sampled or not */
	TRACE_EVICTED,     /* reclaim evicted pages */
	TRACE_INVALIDATED, /* pages left in another way */
	TRACE_READ,	   /* a program reads a sampled page */
	TRACE_WRITTEN,     /* the pages that this task added last were added to be written */
	TRACE_WAITED,      /* the page that this task added last was readable after this time in nanoseconds */
	TRACE_MAPPED,      /* cached pages were mapped around one that a program touched */
};

/* One record of the access trace's ring. */
struct trace_event {
	u32 kind;
	u32 device;
	u64 inode;
	u64 index; /* of the first page */
	u32 pages;
	u32 reserved; /* 0 */
	u64 ns;       /* of WATCH_WAITED */
};

/* Counts since it was attached; one such struct per CPU. */
struct trace_counters {
	u64 read_pages; /* pages that programs read, sampled or not; a page once a call */
	u64 ring_full;  /* records lost */
};

/* Files of one page each, all on one file system, that the calibration uses. */
#define PROBE_FILES 4

/* The calibration's configuration (.rodata). */
struct probe_config {
	u64 inodes[PROBE_FILES]; /* i_ino */
	u32 device;                  /* s_dev */
	u32 reserved;                /* 0 */
};

/* The state of the page of the file at the same position in `inodes` when it left the cache; before that, all zero. */
struct probe_sighting {
	u64 folio;             /* address of its struct folio */
	u64 struct_page_bytes; /* sizeof(struct page) */
};

/* The answer of one run of `peek`. */
struct probe_peek {
	u64 task;   /* address of the running task's task_struct: an address in the linear map */
	u64 failed; /* 0: `page` holds the bytes at the requested address */
	u8 page[TAP_PAGE_SIZE];
};

#endif
