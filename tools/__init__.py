"""Development tools; nothing of the product imports them."""
