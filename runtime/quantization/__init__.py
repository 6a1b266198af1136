"""Storage formats of weights, one per file: how many bytes a slice takes, and the codes to and from float32."""
