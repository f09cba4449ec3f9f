/*
 * The kernel structures that the programs read, by name only. CO-RE fills in the offsets of the
 * running kernel when the program is loaded. So one object serves 6.1 to 6.18 and any kernel that
 * keeps these names. A kernel that lacks a name refuses the program at load; the program never
 * reads the wrong field.
 */
#ifndef TAP_FOLIO_H
#define TAP_FOLIO_H

#include "intf.h"

/* Types that bpf_helpers.h needs; other programs get them from a full dump of the kernel's types. */
typedef u8 __u8;
typedef unsigned short __u16;
typedef u32 __u32;
typedef u64 __u64;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

enum { BPF_MAP_TYPE_ARRAY = 2, BPF_MAP_TYPE_PERCPU_ARRAY = 6, BPF_MAP_TYPE_LRU_HASH = 9, BPF_MAP_TYPE_RINGBUF = 27 };
enum { BPF_RB_NO_WAKEUP = 1, BPF_RB_FORCE_WAKEUP = 2 };
enum { BPF_F_MMAPABLE = 1 << 10 };

#define KERNEL_TYPE __attribute__((preserve_access_index))

typedef struct {
	int counter;
} KERNEL_TYPE atomic_t;

struct super_block {
	u32 s_dev;
} KERNEL_TYPE;

struct inode {
	unsigned short i_mode;
	struct super_block *i_sb;
	unsigned long i_ino;
	u32 i_generation;
	long long i_size;
} KERNEL_TYPE;

struct file {
	struct inode *f_inode;
	long long f_pos;
	u32 f_flags;
} KERNEL_TYPE;

struct fdtable {
	u32 max_fds;
	struct file **fd;
} KERNEL_TYPE;

struct files_struct {
	struct fdtable *fdt;
} KERNEL_TYPE;

struct task_struct {
	struct files_struct *files;
} KERNEL_TYPE;

/* Registers at a system call, on x86-64. */
struct pt_regs {
	unsigned long r10;
	unsigned long dx;
	unsigned long di;
} KERNEL_TYPE;

struct address_space {
	struct inode *host;
	u32 wb_err;
} KERNEL_TYPE;

/* Only its size is used. */
struct page {
	unsigned long flags;
} KERNEL_TYPE;

struct folio {
	struct address_space *mapping;
	unsigned long index;
	atomic_t _refcount;
	unsigned long _flags_1;
} KERNEL_TYPE;

/* `flags` is a plain number up to 6.17, ... */
struct folio___flags_number {
	unsigned long flags;
} KERNEL_TYPE;

/* ... and a struct with the number in it from 6.18. */
typedef struct {
	unsigned long f;
} KERNEL_TYPE memdesc_flags_t;

struct folio___flags_struct {
	memdesc_flags_t flags;
} KERNEL_TYPE;

/* Up to 6.5 the order of a large folio is a field of its own; since then it is the low byte of `_flags_1`. */
struct folio___order_field {
	unsigned char _folio_order;
} KERNEL_TYPE;

/* If memory has control groups: the one that the folio is charged to, with flags in the lowest bits. */
struct kernfs_node {
	u64 id;
} KERNEL_TYPE;

struct cgroup {
	struct kernfs_node *kn;
} KERNEL_TYPE;

struct cgroup_subsys_state {
	struct cgroup *cgroup;
} KERNEL_TYPE;

struct mem_cgroup {
	struct cgroup_subsys_state css;
} KERNEL_TYPE;

struct folio___memcg {
	unsigned long memcg_data;
} KERNEL_TYPE;

#define MEMCG_FLAGS 7UL

/* Only the names matter: the bits depend on the kernel's version and configuration. */
enum pageflags {
	PG_writeback = 1,
	PG_uptodate,
	PG_dirty,
	PG_head,
	PG_hwpoison,
};

#define PAGE_FLAG(name) (1UL << bpf_core_enum_value(enum pageflags, name))

static __always_inline unsigned long folio_flags(const struct folio *folio)
{
	const struct folio___flags_struct *with_struct = (const void *)folio;
	const struct folio___flags_number *with_number = (const void *)folio;

	if (bpf_core_field_exists(with_struct->flags.f))
		return BPF_CORE_READ(with_struct, flags.f);
	return BPF_CORE_READ(with_number, flags);
}

static __always_inline u32 folio_order(const struct folio *folio, unsigned long flags)
{
	const struct folio___order_field *with_field = (const void *)folio;

	/* Only a large folio has fields beyond the first struct page. */
	if (!(flags & PAGE_FLAG(PG_head)))
		return 0;
	if (bpf_core_field_exists(with_field->_folio_order))
		return BPF_CORE_READ(with_field, _folio_order);
	return BPF_CORE_READ(folio, _flags_1) & 0xff;
}

/* Returns the lower half of the inode number of the control group's directory. 0: no group, or the kernel has none. */
static __always_inline u32 folio_cgroup(const struct folio *folio)
{
	const struct folio___memcg *with_group = (const void *)folio;
	struct mem_cgroup *group;

	if (!bpf_core_field_exists(with_group->memcg_data))
		return 0;
	group = (void *)(BPF_CORE_READ(with_group, memcg_data) & ~MEMCG_FLAGS);
	return group ? BPF_CORE_READ(group, css.cgroup, kn, id) : 0;
}

#endif
