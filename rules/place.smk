rule place:
    input:
        model=SOURCE,
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/place.json",
    log:
        f"{DEVICE}/logs/place.log",
    benchmark:
        f"{DEVICE}/benchmarks/place.tsv"
    threads: 1
    resources:
        mem_mb=mem_mb("place"),
        runtime=runtime("place"),
    params:
        code=commands.code(CONFIG, "place"),
        settings=commands.settings(CONFIG, "place"),
        records=commands.records,
    shell:
        commands.job("place")
