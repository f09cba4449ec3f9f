/*
 * Two small programs with which the tap finds, at its start, the place of this kernel's memory map.
 * They are loaded for a moment only. crates/tap/src/layout_probe.rs describes their results, and
 * how it checks them.
 */
#include "folio.h"

const volatile struct probe_config config = {};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PROBE_FILES);
	__type(key, u32);
	__type(value, struct probe_sighting);
} sightings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct probe_peek);
} peeked SEC(".maps");

/* Records the folio of each watched file's page when the page leaves the cache. */
SEC("raw_tp/mm_filemap_delete_from_page_cache")
int witness(u64 *arguments)
{
	const struct folio *folio = (const void *)arguments[0];
	struct inode *inode = BPF_CORE_READ(folio, mapping, host);
	struct probe_sighting sighting = {};
	u64 number;

	if (BPF_CORE_READ(inode, i_sb, s_dev) != config.device || BPF_CORE_READ(folio, index) != 0)
		return 0;
	number = BPF_CORE_READ(inode, i_ino);
	sighting.folio = (u64)folio;
	sighting.struct_page_bytes = bpf_core_type_size(struct page);
	for (u32 file = 0; file < PROBE_FILES; file++) {
		u32 key = file;

		if (config.inodes[file] == number)
			bpf_map_update_elem(&sightings, &key, &sighting, 0);
	}
	return 0;
}

/* Reads the page at the address in its argument. Never attached: user space runs it by BPF_PROG_TEST_RUN. */
SEC("raw_tp")
int peek(u64 *arguments)
{
	u32 zero = 0;
	struct probe_peek *answer = bpf_map_lookup_elem(&peeked, &zero);

	if (!answer)
		return 0;
	answer->task = bpf_get_current_task();
	answer->failed = bpf_probe_read_kernel(answer->page, sizeof(answer->page), (void *)arguments[0]) != 0;
	return 0;
}

/* Only programs under a GPL-compatible licence may read kernel memory; this one is offered under both. */
char LICENSE[] SEC("license") = "Dual MIT/GPL";
