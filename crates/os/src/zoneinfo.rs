//! The memory zones of the machine (`/proc/zoneinfo`, written by `zoneinfo_show_print` in the
//! kernel's mm/vmstat.c).

/// The sum of the high watermarks of all zones, in pages. Lines that cannot be parsed add nothing.
///
/// Each zone has a line `high` of its own. The limits of its processors' lists have other names
/// (`high:`, `high_min:`).
pub fn high_watermark_pages(zoneinfo: &str) -> u64 {
    let pages = |line: &str| line.trim_start().strip_prefix("high ")?.trim().parse::<u64>().ok();
    zoneinfo.lines().filter_map(pages).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines from Linux 6.18 on a machine of 20 GiB, of three zones and one processor.
    const ZONEINFO: &str = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 99625
  pages free     3840
        boost    0
        min      12
        low      15
        high     18
        promo    21
        spanned  4095
        protection: (0, 3019, 19787, 19787, 19787)
      nr_free_pages 3840
  pagesets
    cpu: 0
              count:    0
              high:     0
              batch:    1
              high_min: 7
              high_max: 240
  vm stats threshold: 4
Node 0, zone    DMA32
  pages free     772917
        boost    0
        min      2576
        low      3348
        high     4120
        promo    4892
  pagesets
    cpu: 0
              count:    0
              high:     1674
              batch:    63
              high_min: 1674
              high_max: 48307
  vm stats threshold: 24
Node 0, zone  Movable
  pages free     0
        boost    0
        min      32
        low      32
        high     32
        promo    32
        protection: (0, 0, 0, 0, 0)
";

    #[test]
    fn the_high_watermarks_of_all_zones_are_added() {
        assert_eq!(high_watermark_pages(ZONEINFO), 18 + 4120 + 32);
        for (text, pages) in [("", 0), ("high\nhigh \nhigh -1\nhigh x\n high: 9", 0), ("high 1\nhigh   2 ", 3)] {
            assert_eq!(high_watermark_pages(text), pages, "{text:?}");
        }
        let max = u64::MAX;
        assert_eq!(high_watermark_pages(&format!("high {max}\nhigh {max}\n")), max);
    }
}
