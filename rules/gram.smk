rule gram:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        sparsity=f"{DEVICE}/allocate.json",
    output:
        f"{DEVICE}/gram.json",
    log:
        f"{DEVICE}/logs/gram.log",
    benchmark:
        f"{DEVICE}/benchmarks/gram.tsv"
    threads: 8
    resources:
        mem_mb=mem_mb("gram"),
        runtime=runtime("gram"),
    params:
        code=commands.code(CONFIG, "gram"),
        settings=commands.settings(CONFIG, "gram"),
        records=commands.records,
    shell:
        commands.job("gram")
