//! Pictures that commands draw with `--picture FILE`.

use anyhow::{Context, Result, bail};
use std::path::Path;

/// Whether a file of that name can be drawn: to be asked before anything that takes long.
pub fn check(file: &Path) -> Result<()> {
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(()),
        _ => bail!("{} is neither an .svg nor a .png: give it such a name", file.display()),
    }
}

/// Writes a drawing as what the file's name says.
pub fn save(svg: &str, file: &Path) -> Result<()> {
    check(file)?;
    if file.extension().is_some_and(|extension| extension == "svg") {
        return std::fs::write(file, svg).with_context(|| format!("cannot write {}", file.display()));
    }
    if !drawing::render(svg, file).map_err(anyhow::Error::msg)? {
        bail!("there is no font here to draw a .png with: install one (fonts-dejavu-core), or write an .svg");
    }
    Ok(())
}
