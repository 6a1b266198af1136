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
    threads: 1
    resources:
        mem_mb=mem_mb("layout"),
        runtime=runtime("layout"),
    params:
        code=commands.code(CONFIG, "layout"),
        settings=commands.settings(CONFIG, "layout"),
        records=commands.records,
    shell:
        commands.job("layout")
