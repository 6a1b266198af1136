rule layout:
    input:
        model=SOURCE,
        sparsity=f"{DEVICE}/allocate.json",
        device=f"{DEVICE}/device.json",
        arrays=arrays(f"{DEVICE}/allocate.json"),
    output:
        record=f"{DEVICE}/layout.json",
    log:
        f"{DEVICE}/logs/layout.log",
    benchmark:
        f"{DEVICE}/benchmarks/layout.tsv"
    cache: CACHED
    resources:
        **needs("layout"),
    params:
        **commands.params(CONFIG, "layout"),
    shell:
        commands.job("layout")
