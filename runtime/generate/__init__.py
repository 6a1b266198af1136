"""Sessions, batches, drafts and sampling: from prompt ids to new token ids."""
