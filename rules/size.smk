rule size:
    input:
        model=SOURCE,
        corpus=f"{MODEL}/tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
        ladders=per_chunk("predict"),
        arrays=arrays(SOURCE, f"{MODEL}/tokenize.json", f"{DEVICE}/allocate.json", per_chunk("predict")),
    output:
        record=f"{DEVICE}/size.json",
    log:
        f"{DEVICE}/logs/size.log",
    benchmark:
        f"{DEVICE}/benchmarks/size.tsv"
    cache: CACHED
    threads: 8
    resources:
        mem_mb=mem_mb("size"),
        runtime=runtime("size"),
    params:
        code=commands.code(CONFIG, "size"),
        settings=commands.settings(CONFIG, "size"),
        records=commands.records,
    shell:
        commands.job("size")
