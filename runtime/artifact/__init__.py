"""The only reader of artifacts (schemas/FORMAT.md): opens a folder, checks everything in it, returns its contents."""
