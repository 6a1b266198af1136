rule place:
    input:
        model=SOURCE,
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
        device=f"{DEVICE}/device.json",
        arrays=arrays(f"{DEVICE}/recalibrate.json", f"{DEVICE}/allocate.json"),
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
