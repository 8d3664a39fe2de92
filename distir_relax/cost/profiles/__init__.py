"""The machines that are known, as TOML."""
