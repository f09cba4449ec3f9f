/*
 * Watches the page cache of file systems, without changing anything: which pages are added, which
 * are evicted, and which of them programs read. For `pumapool advise`, for a minute. It copies
 * names only, no page contents.
 *
 * It runs for every page that is added, evicted or read, so it checks the file system first. Reads
 * are by far the most frequent. Only sampled pages are reported one by one (by the hash of their
 * name, as in the crate mrc); the others are counted.
 *
 * Reads that hit are seen if the kernel has the tracepoint mm_filemap_get_pages; on kernels without
 * it, by the system calls read and pread64. For pages that are mapped into programs only the first
 * touch is seen, by the tracepoints of faults.
 */
#include "folio.h"

const volatile struct trace_config config = {};
struct trace_shared shared = {};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096); /* replaced before the load */
} ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct trace_counters);
} counters SEC(".maps");

/* The state of a task. */
struct reader {
	/* The first page that it had added since it last read any; 0: none. */
	u64 added_mapping;
	u64 added_index;
	u64 added_ns;
	/* The consecutive pages that it had added last; 0: none that may still be written. */
	u64 run_mapping;
	u64 run_first;
	u64 run_end;
	/* The range of the last call. */
	u64 mapping;
	u64 first;
	u64 last;
};

/* Of more tasks, the least recently seen are forgotten. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, u32);
	__type(value, struct reader);
} readers SEC(".maps");

#define MODE_TYPE 0170000
#define MODE_REGULAR 0100000
#define O_DIRECT 040000

/* The maximum number of pages of one read that are reported: 32 MiB. */
#define READ_PAGES_MAX 8192
/* System calls, on x86-64. */
#define CALL_READ 0
#define CALL_WRITE 1
#define CALL_PREAD64 17
#define CALL_PWRITE64 18
#define CALL_WRITEV 20
#define CALL_PWRITEV 296
#define PAGE_SHIFT 12

/* The finalizer of SplitMix64, as in the crate mrc. */
static __always_inline u64 mix(u64 x)
{
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

/* Returns the file's part of the hash. */
static __always_inline u64 file_hash(u32 device, u64 inode)
{
	return mix(mix(device) ^ inode);
}

static __always_inline int is_sampled(u64 file_hash, u64 index)
{
	return mix(file_hash ^ index) >> 32 < shared.threshold;
}

/* Returns the device if the inode is a regular file on a watched device; else 0. */
static __always_inline u32 watched(struct inode *inode)
{
	u32 device = BPF_CORE_READ(inode, i_sb, s_dev);
	int found = 0;

	for (int nth = 0; nth < TRACE_DEVICES; nth++)
		found |= config.devices[nth] == device;
	if (!found || (BPF_CORE_READ(inode, i_mode) & MODE_TYPE) != MODE_REGULAR)
		return 0;
	return device;
}

static __always_inline struct trace_counters *mine(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&counters, &zero);
}

static __always_inline void tell(u32 kind, u32 device, u64 inode, u64 index, u32 pages, u64 ns)
{
	struct trace_event *event = bpf_ringbuf_reserve(&ring, sizeof(*event), 0);
	struct trace_counters *counters = mine();

	if (!event) {
		if (counters)
			counters->ring_full++;
		return;
	}
	event->kind = kind;
	event->device = device;
	event->inode = inode;
	event->index = index;
	event->pages = pages;
	event->reserved = 0;
	event->ns = ns;
	bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
}

static __always_inline struct reader *reader(void)
{
	struct reader nobody = {};
	u32 task = (u32)bpf_get_current_pid_tgid();
	struct reader *reader = bpf_map_lookup_elem(&readers, &task);

	if (!reader) {
		bpf_map_update_elem(&readers, &task, &nobody, 0);
		reader = bpf_map_lookup_elem(&readers, &task);
	}
	return reader;
}

static __always_inline u32 folio_pages(const struct folio *folio)
{
	return 1U << (folio_order(folio, folio_flags(folio)) & 31);
}

SEC("raw_tp/mm_filemap_add_to_page_cache")
int added(u64 *arguments)
{
	const struct folio *folio = (const void *)arguments[0];
	struct address_space *mapping = BPF_CORE_READ(folio, mapping);
	struct inode *inode = BPF_CORE_READ(mapping, host);
	u32 device = watched(inode);
	struct reader *task;
	u64 index;

	if (!device)
		return 0;
	index = BPF_CORE_READ(folio, index);
	tell(TRACE_ADDED, device, BPF_CORE_READ(inode, i_ino), index, folio_pages(folio), 0);
	task = reader();
	if (!task)
		return 0;
	if (!task->added_mapping) {
		task->added_mapping = (u64)mapping;
		task->added_index = index;
		task->added_ns = bpf_ktime_get_ns();
	}
	if (task->run_mapping != (u64)mapping || task->run_end != index) {
		task->run_mapping = (u64)mapping;
		task->run_first = index;
	}
	task->run_end = index + folio_pages(folio);
	return 0;
}

SEC("raw_tp/mm_filemap_delete_from_page_cache")
int deleted(u64 *arguments)
{
	const struct folio *folio = (const void *)arguments[0];
	struct inode *inode = BPF_CORE_READ(folio, mapping, host);
	u32 device = watched(inode), pages;
	u64 number, index;
	/* As in tap.bpf.c: reclaim has frozen the count. */
	u32 kind;

	if (!device)
		return 0;
	number = BPF_CORE_READ(inode, i_ino);
	index = BPF_CORE_READ(folio, index);
	pages = folio_pages(folio);
	kind = BPF_CORE_READ(folio, _refcount.counter) ? TRACE_INVALIDATED : TRACE_EVICTED;
	/* Large folios are few: the consumer of the record selects their sampled pages. */
	if (pages > 1 || is_sampled(file_hash(device, number), index))
		tell(kind, device, number, index, pages, 0);
	return 0;
}

/* Pages that were added last, and not to be read, are about to be overwritten: they are no misses. */
SEC("raw_tp/writeback_dirty_folio")
int dirtied(u64 *arguments)
{
	const struct folio *folio = (const void *)arguments[0];
	u64 mapping = arguments[1], index;
	u32 name = (u32)bpf_get_current_pid_tgid(), device;
	struct reader *task = bpf_map_lookup_elem(&readers, &name);
	struct inode *inode;

	if (!task || !mapping || task->run_mapping != mapping)
		return 0;
	index = BPF_CORE_READ(folio, index);
	if (index < task->run_first || index >= task->run_end)
		return 0;
	if (task->added_mapping == mapping && task->added_index == index)
		task->added_mapping = 0;
	inode = BPF_CORE_READ((struct address_space *)mapping, host);
	device = watched(inode);
	if (device)
		tell(TRACE_WRITTEN, device, BPF_CORE_READ(inode, i_ino), index, folio_pages(folio), 0);
	return 0;
}

/* A range that is being read. */
struct walk {
	u64 inode;
	u64 file_hash;
	u64 first;
	u32 device;
};

static long tell_of_page(u64 nth, void *data)
{
	const struct walk *walk = data;

	if (is_sampled(walk->file_hash, walk->first + nth))
		tell(TRACE_READ, walk->device, walk->inode, walk->first + nth, 1, 0);
	return 0;
}

static __always_inline void read_pages(struct inode *inode, u32 device, u64 first, u64 last)
{
	struct walk walk = { .inode = BPF_CORE_READ(inode, i_ino), .first = first, .device = device };
	struct trace_counters *counters = mine();
	u64 pages = last - first + 1;

	if (!counters || last < first)
		return;
	walk.file_hash = file_hash(device, walk.inode);
	if (pages > READ_PAGES_MAX)
		pages = READ_PAGES_MAX;
	counters->read_pages += pages;
	if (pages == 1)
		tell_of_page(0, &walk);
	else
		bpf_loop(pages, tell_of_page, &walk, 0);
}

/*
 * Pages are about to be copied to a program. A large read causes several calls, each with the rest
 * of the range. The first call has reported the whole range.
 */
SEC("raw_tp/mm_filemap_get_pages")
int got(u64 *arguments)
{
	struct address_space *mapping = (void *)arguments[0];
	u64 first = arguments[1], last = arguments[2];
	struct inode *inode = BPF_CORE_READ(mapping, host);
	u32 device = watched(inode);
	u64 size = (u64)BPF_CORE_READ(inode, i_size);
	struct reader *task;
	int is_rest;

	if (!device)
		return 0;
	task = reader();
	if (!task)
		return 0;
	task->run_mapping = 0;
	if (task->added_mapping) {
		if (task->added_mapping == (u64)mapping && first <= task->added_index && task->added_index <= last)
			tell(TRACE_WAITED, device, BPF_CORE_READ(inode, i_ino), task->added_index, 1,
			     bpf_ktime_get_ns() - task->added_ns);
		task->added_mapping = 0;
	}
	is_rest = task->mapping == (u64)mapping && task->last == last && task->first < first;
	task->mapping = (u64)mapping;
	task->first = first;
	task->last = last;
	/* The requested range may extend beyond the end, where nothing is read. */
	if (size && last > (size - 1) >> PAGE_SHIFT)
		last = (size - 1) >> PAGE_SHIFT;
	if (!is_rest && size)
		read_pages(inode, device, first, last);
	return 0;
}

/* For kernels without that tracepoint. Attached only there, because it runs for each system call of the machine. */
SEC("raw_tp/sys_enter")
int called(u64 *arguments)
{
	const struct pt_regs *registers = (const void *)arguments[0];
	u32 name = (u32)bpf_get_current_pid_tgid(), device;
	u64 call = arguments[1], number, bytes, position, size;
	struct task_struct *task;
	struct fdtable *table;
	struct inode *inode;
	struct file **files, *file;
	struct reader *writer;

	if (call == CALL_WRITE || call == CALL_PWRITE64 || call == CALL_WRITEV || call == CALL_PWRITEV) {
		/* The pages that were added until now were added to be read. */
		writer = bpf_map_lookup_elem(&readers, &name);
		if (writer)
			writer->run_mapping = 0;
		return 0;
	}
	if (call != CALL_READ && call != CALL_PREAD64)
		return 0;
	task = (void *)bpf_get_current_task();
	table = BPF_CORE_READ(task, files, fdt);
	number = (u32)BPF_CORE_READ(registers, di);
	if (number >= BPF_CORE_READ(table, max_fds))
		return 0;
	files = BPF_CORE_READ(table, fd);
	if (bpf_probe_read_kernel(&file, sizeof(file), &files[number]) || !file)
		return 0;
	inode = BPF_CORE_READ(file, f_inode);
	device = watched(inode);
	if (!device || BPF_CORE_READ(file, f_flags) & O_DIRECT)
		return 0;
	bytes = BPF_CORE_READ(registers, dx);
	position = call == CALL_READ ? (u64)BPF_CORE_READ(file, f_pos) : BPF_CORE_READ(registers, r10);
	size = (u64)BPF_CORE_READ(inode, i_size);
	if (!bytes || position >= size)
		return 0;
	if (bytes > size - position)
		bytes = size - position;
	read_pages(inode, device, position >> PAGE_SHIFT, (position + bytes - 1) >> PAGE_SHIFT);
	return 0;
}

/* A program has touched a mapped page that is not in its page table. */
SEC("raw_tp/mm_filemap_fault")
int faulted(u64 *arguments)
{
	struct inode *inode = BPF_CORE_READ((struct address_space *)arguments[0], host);
	u32 device = watched(inode);

	if (device)
		read_pages(inode, device, arguments[1], arguments[1]);
	return 0;
}

/* The kernel maps cached pages around one that was touched. The tracepoint does not tell which one. */
SEC("raw_tp/mm_filemap_map_pages")
int mapped(u64 *arguments)
{
	struct inode *inode = BPF_CORE_READ((struct address_space *)arguments[0], host);
	u32 device = watched(inode);

	if (device && arguments[1] <= arguments[2])
		tell(TRACE_MAPPED, device, BPF_CORE_READ(inode, i_ino), arguments[1], arguments[2] - arguments[1] + 1, 0);
	return 0;
}

/* Only programs under a GPL-compatible licence may read kernel memory; this one is offered under both. */
char LICENSE[] SEC("license") = "Dual MIT/GPL";
