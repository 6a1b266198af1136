rule place:
    input:
        model=SOURCE,
        activations=RECALIBRATED,
        sparsity=SPARSITY,
        device=f"{DEVICE}/device.json",
        arrays=arrays(RECALIBRATED, SPARSITY),
    output:
        record=f"{DEVICE}/place.json",
        arrays=directory(f"{DEVICE}/place"),
    log:
        f"{DEVICE}/logs/place.log",
    benchmark:
        f"{DEVICE}/benchmarks/place.tsv"
    cache: CACHED
    resources:
        **needs("place"),
    params:
        **commands.params(CONFIG, "place"),
    shell:
        commands.job("place")
