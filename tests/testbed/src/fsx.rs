/// The settings of `fsx` (crate fsx, 0.3) for a file of at most `length_bytes`: every operation it
/// knows, most often reads and writes, through calls and through mappings.
///
/// Without this setting it would also try to allocate no bytes at all, which every kernel refuses
/// (EINVAL) and fsx reports as a failure: so no operation is empty. (Seed 887585178 fails so in a
/// plain directory.)
#[must_use]
pub fn fsx_settings(length_bytes: u64) -> String {
    format!(
        "flen = {length_bytes}\n[opsize]\nmin = 1\n[weights]\nclose_open = 1.0\ninvalidate = 1.0\nmapread = 10.0\nmapwrite = 10.0\n\
         read = 10.0\nwrite = 10.0\ntruncate = 3.0\nfsync = 1.0\nfdatasync = 1.0\nposix_fallocate = 1.0\npunch_hole = 3.0\n\
         sendfile = 3.0\nposix_fadvise = 3.0\ncopy_file_range = 3.0\n"
    )
}
