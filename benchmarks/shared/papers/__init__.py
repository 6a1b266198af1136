"""The papers' own equations of cost, one file per paper, on this project's figures of a device."""
