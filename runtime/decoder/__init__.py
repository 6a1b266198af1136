"""One decoder for every supported architecture, driven by the manifest's ModelSpec. numpy and the kernels, no torch."""
