"""The only reader of artifacts (schemas/FORMAT.md): opens a folder, believes nothing in it, hands out what it holds."""
