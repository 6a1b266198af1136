rule allocate:
    input:
        model=DENSE,
        corpus="tokenize.json",
        activations="calibrate.json",
        curves=CURVES,
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/allocate.json",
    log:
        f"{DEVICE}/logs/allocate.log",
    benchmark:
        f"{DEVICE}/benchmarks/allocate.tsv"
    threads: 8
    resources:
        mem_mb=mem_mb("allocate"),
        runtime=runtime("allocate"),
    params:
        code=commands.code(CONFIG, "allocate"),
        settings=commands.settings(CONFIG, "allocate"),
        records=commands.records,
    shell:
        commands.job("allocate")
