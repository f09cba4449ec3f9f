//! Pictures that commands draw with `--picture FILE`.

use anyhow::{Context, Result, bail};
use std::path::Path;

/// Checks that a file of that name can be drawn. Call it before work that takes long.
///
/// # Errors
/// Fails if the extension is neither `svg` nor `png`.
pub fn check(file: &Path) -> Result<()> {
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(()),
        _ => bail!("{} is neither an .svg nor a .png; give it one of these extensions", file.display()),
    }
}

/// Writes a drawing in the format of the file's extension.
pub fn save(svg: &str, file: &Path) -> Result<()> {
    check(file)?;
    if file.extension().is_some_and(|extension| extension == "svg") {
        return std::fs::write(file, svg).with_context(|| format!("cannot write {}", file.display()));
    }
    if !charts::render(svg, file).map_err(anyhow::Error::msg)? {
        bail!("drawing a .png needs a font: install one (fonts-dejavu-core), or write an .svg");
    }
    Ok(())
}
