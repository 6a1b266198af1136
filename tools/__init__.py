"""Tools of development: nothing of the product imports them."""
