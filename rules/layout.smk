rule layout:
    input:
        model=SOURCE,
        sparsity=SPARSITY,
        device=f"{DEVICE}/device.json",
        arrays=arrays(SPARSITY),
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
