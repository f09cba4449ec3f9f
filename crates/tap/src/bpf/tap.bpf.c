/*
 * The eviction tap. It copies each clean page of one file system into a ring at the moment reclaim
 * evicts it. If the consumer does not need the bytes, it only reports the eviction.
 *
 * It runs in the tracepoint mm_filemap_delete_from_page_cache, under the lock of the file's page
 * tree and with interrupts off, for every page that leaves any page cache of the machine. So it
 * checks the file system first, allocates nothing, and waits for nothing. If the ring is full, it
 * only counts: a page lost here is only a miss later.
 *
 * Evictions are distinguished by one test. Reclaim (and everything else that may drop only clean
 * and unused pages, such as POSIX_FADV_DONTNEED) has frozen the folio's reference count at 0 at
 * this point. Truncation and invalidation hold references.
 *
 * Reading the bytes is safe: at a count of 0 no other user can get the folio, no mapping of it is
 * left, and its memory is freed only after the tracepoint.
 */
#include "folio.h"

const volatile struct tap_config config = {};
struct tap_shared shared = {};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096); /* replaced before the load */
} ring SEC(".maps");

/* The ring of pages that are added, if these reports are wanted. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096); /* replaced before the load */
} added_ring SEC(".maps");

/* Written by the consumer at any time: one fingerprint at a time. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 64); /* replaced before the load */
	__type(key, u32);
	__type(value, struct skip_list_line);
} skip_list SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct tap_counters);
} counters SEC(".maps");

#define MODE_TYPE 0170000
#define MODE_REGULAR 0100000

/* One folio on its way into the ring. */
struct walk {
	u64 folio;   /* address of the first page's struct page */
	u64 address; /* of the first page's bytes in the linear map */
	u64 index;   /* of the first page */
	u64 inode;
	struct tap_counters *counters;
	u32 generation;
	u32 cgroup;
};

/* Returns whether the hardware has reported the memory as broken: it must not be touched. Only some kernels have the flag. */
static __always_inline int is_poisoned(const struct walk *walk, u64 nth)
{
	const struct folio *page = (const void *)(walk->folio + nth * bpf_core_type_size(struct page));

	return bpf_core_enum_value_exists(enum pageflags, PG_hwpoison) && folio_flags(page) & PAGE_FLAG(PG_hwpoison);
}

/*
 * Returns the flag with which to submit a record. A wake-up is an interrupt to the own processor,
 * which in a virtual machine costs more than all the rest. The kernel's own rule is to wake
 * whenever the consumer has caught up, which is nearly always so for a busy consumer. So the
 * program wakes only a consumer that has set the flag that it sleeps. The exchange is a full
 * barrier between the reservation of the record and the read of the flag. The consumer has one
 * between its setting of the flag and its look at the ring. So at least one of the two sees the
 * other.
 */
static __always_inline u64 wakeup(void)
{
	return __sync_lock_test_and_set(&shared.consumer_sleeps, 0) ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

/*
 * Returns whether the consumer does not need the bytes of this page. The hint applies to one
 * eviction: if it was wrong, or is no longer right, the next eviction is captured.
 */
static __always_inline int is_skipped(u32 generation, u64 index)
{
	u64 hash = ((u64)generation << 32 | (u32)index) / SKIP_LIST_LINE_PAGES * SKIP_LIST_MULTIPLIER;
	u32 number = hash >> (config.skip_list_shift & 63);
	struct skip_list_line *line = bpf_map_lookup_elem(&skip_list, &number);
	u32 *fingerprint;

	if (!line || index >> 32)
		return 0;
	fingerprint = &line->fingerprints[index % SKIP_LIST_LINE_PAGES];
	if (*fingerprint != ((u32)hash | 1))
		return 0;
	*fingerprint = 0;
	return 1;
}

static __always_inline void fill_head(struct tap_head *head, const struct walk *walk, u64 nth)
{
	head->generation = walk->generation;
	head->cgroup = walk->cgroup;
	head->inode = walk->inode;
	head->index = walk->index + nth;
}

static long capture_page(u64 nth, void *data)
{
	const struct walk *walk = data;
	struct tap_event *event;
	struct tap_head *head;

	if (is_poisoned(walk, nth)) {
		walk->counters->unreadable++;
		return 0;
	}
	if (is_skipped(walk->generation, walk->index + nth)) {
		head = bpf_ringbuf_reserve(&ring, sizeof(*head), 0);
		if (!head) {
			walk->counters->ring_full++;
			return 0;
		}
		fill_head(head, walk, nth);
		bpf_ringbuf_submit(head, wakeup());
		walk->counters->captured++;
		walk->counters->omitted++;
		return 0;
	}
	event = bpf_ringbuf_reserve(&ring, sizeof(*event), 0);
	if (!event) {
		walk->counters->ring_full++;
		return 0;
	}
	fill_head(&event->head, walk, nth);
	if (bpf_probe_read_kernel(event->page, sizeof(event->page), (void *)(walk->address + nth * TAP_PAGE_SIZE))) {
		bpf_ringbuf_discard(event, wakeup());
		walk->counters->unreadable++;
		return 0;
	}
	bpf_ringbuf_submit(event, wakeup());
	walk->counters->captured++;
	return 0;
}

SEC("raw_tp/mm_filemap_delete_from_page_cache")
int tap(u64 *arguments)
{
	const struct folio *folio = (const void *)arguments[0];
	struct address_space *mapping = BPF_CORE_READ(folio, mapping);
	struct inode *inode = BPF_CORE_READ(mapping, host);
	struct tap_counters *mine;
	struct walk walk = {};
	unsigned long flags;
	u32 zero = 0, order;
	u64 pages, pfn;

	if (BPF_CORE_READ(inode, i_sb, s_dev) != config.device)
		return 0;
	/* Directories and symbolic links have pages too, which are not lent. */
	if ((BPF_CORE_READ(inode, i_mode) & MODE_TYPE) != MODE_REGULAR)
		return 0;
	mine = bpf_map_lookup_elem(&counters, &zero);
	if (!mine)
		return 0;

	flags = folio_flags(folio);
	order = folio_order(folio, flags);
	pages = 1ULL << (order & 63);
	if (BPF_CORE_READ(folio, _refcount.counter) != 0) {
		mine->invalidated += pages;
		return 0;
	}
	if (!(flags & PAGE_FLAG(PG_uptodate)) || flags & (PAGE_FLAG(PG_dirty) | PAGE_FLAG(PG_writeback)) ||
	    pages > TAP_FOLIO_PAGES_MAX) {
		mine->unreadable += pages;
		return 0;
	}
	/*
	 * A page whose writeback failed is clean and up to date, but its bytes are not in the backing
	 * file. The kernel does not store which page that is, only that it happened in this file.
	 */
	if (BPF_CORE_READ(mapping, wb_err) != 0) {
		mine->unreadable += pages;
		return 0;
	}

	pfn = ((u64)folio - config.vmemmap_base) / bpf_core_type_size(struct page);
	walk.folio = (u64)folio;
	walk.address = config.linear_base + pfn * TAP_PAGE_SIZE;
	walk.index = BPF_CORE_READ(folio, index);
	walk.inode = BPF_CORE_READ(inode, i_ino);
	walk.generation = BPF_CORE_READ(inode, i_generation);
	walk.cgroup = config.tells_cgroup ? folio_cgroup(folio) : 0;
	walk.counters = mine;
	if (pages == 1) {
		capture_page(0, &walk);
	} else {
		mine->large_folios++;
		bpf_loop(pages, capture_page, &walk, 0);
	}
	return 0;
}

/*
 * Reports pages that are added to the page cache, before they are read. Attached only if these
 * reports are wanted. Reports that are lost because the ring is full do no harm.
 */
SEC("raw_tp/mm_filemap_add_to_page_cache")
int added(u64 *arguments)
{
	const struct folio *folio = (const void *)arguments[0];
	struct inode *inode = BPF_CORE_READ(folio, mapping, host);
	struct tap_added *added;

	if (BPF_CORE_READ(inode, i_sb, s_dev) != config.device)
		return 0;
	if ((BPF_CORE_READ(inode, i_mode) & MODE_TYPE) != MODE_REGULAR)
		return 0;
	added = bpf_ringbuf_reserve(&added_ring, sizeof(*added), 0);
	if (!added)
		return 0;
	added->generation = BPF_CORE_READ(inode, i_generation);
	added->pages = 1U << (folio_order(folio, folio_flags(folio)) & 31);
	added->inode = BPF_CORE_READ(inode, i_ino);
	added->index = BPF_CORE_READ(folio, index);
	bpf_ringbuf_submit(added, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Only programs under a GPL-compatible licence may read kernel memory; this one is offered under both. */
char LICENSE[] SEC("license") = "Dual MIT/GPL";
