//! The common parts of all charts: their style, and their conversion to PNG. A chart is drawn once,
//! as SVG; the PNG is the same drawing, rendered with the fonts of the machine.

use resvg::{tiny_skia, usvg};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// Pixels of the PNG for one unit of the drawing: sharp on a dense screen too.
const SCALE: f32 = 2.0;
/// First choice of font, which `make deps` installs; any other without serifs will do.
const FONT: &str = "DejaVu Sans";
/// Colour of the most important texts.
pub const INK: &str = "#1f2933";
/// Colour of explanations.
pub const PALE_INK: &str = "#52606d";
/// Colour of the lines in the background.
pub const GRID: &str = "#e4e7eb";

/// The beginning of a drawing of that size, on white. It ends with `</svg>`.
pub fn begin(width: f64, height: f64) -> String {
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="'{FONT}', sans-serif"><rect width="{width}" height="{height}" fill="white"/>"#
    )
}

/// Writes a text. `anchor` is SVG's: `start`, `middle` or `end`.
#[expect(clippy::too_many_arguments, reason = "a drawing primitive: each call is one line of the drawing")]
pub fn text(svg: &mut String, x: f64, y: f64, size: f64, fill: &str, anchor: &str, bold: bool, content: &str) {
    // The white outline keeps lines of the grid from crossing letters.
    let weight = if bold { "bold" } else { "normal" };
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    let _infallible = write!(
        svg,
        r#"<text x="{x:.1}" y="{y:.1}" font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}" stroke="white" stroke-width="4" stroke-linejoin="round" paint-order="stroke">{content}</text>"#
    );
}

/// Renders a drawing into a PNG file. Returns false, without a file, if the machine has no font for
/// its text.
///
/// # Errors
/// Fails, with one line, if the drawing is invalid, or the file cannot be written.
pub fn render(svg: &str, file: &Path) -> Result<bool, String> {
    let mut fonts = usvg::fontdb::Database::new();
    fonts.load_system_fonts();
    // `make deps` installs the font there; a system without a font configuration would not search
    // there.
    fonts.load_fonts_dir("/usr/share/fonts");
    let first = fonts.faces().next().and_then(|face| Some(face.families.first()?.0.clone()));
    let Some(any) = first else { return Ok(false) };
    let has_font = fonts.faces().any(|face| face.families.iter().any(|(family, _)| family == FONT));
    fonts.set_sans_serif_family(if has_font { FONT.to_owned() } else { any });
    let problem = |what: &str, error: &dyn std::fmt::Display| format!("{what} the chart: {error}");
    let options = usvg::Options { fontdb: Arc::new(fonts), ..usvg::Options::default() };
    let tree = usvg::Tree::from_str(svg, &options).map_err(|error| problem("understanding", &error))?;
    let size = tree.size();
    let (width, height) = ((size.width() * SCALE) as u32, (size.height() * SCALE) as u32);
    let mut pixels = tiny_skia::Pixmap::new(width, height).ok_or_else(|| problem("rendering", &"it has no size"))?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    let png = pixels.encode_png().map_err(|error| problem("encoding", &error))?;
    fs::write(file, png).map_err(|error| format!("writing {}: {error}", file.display()))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_is_rendered() {
        let mut svg = begin(120.0, 40.0);
        text(&mut svg, 60.0, 20.0, 12.0, INK, "middle", true, "a < b & c");
        assert!(svg.contains("a &lt; b &amp; c"));
        svg.push_str("</svg>");
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("chart.png");
        if render(&svg, &file).unwrap() {
            assert!(fs::read(&file).unwrap().starts_with(b"\x89PNG"));
        } else {
            testbed::skip("a_drawing_is_rendered", "no font is installed; `make deps` installs one");
        }
        let refused = render("<svg", &file).unwrap_err();
        assert!(refused.to_string().contains("understanding the chart"));
    }
}
