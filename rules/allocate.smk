rule allocate:
    input:
        model=DENSE,
        corpus=f"{MODEL}/tokenize.json",
        activations=f"{MODEL}/calibrate.json",
        curves=CURVES,
        drafter=DRAFTER,
        device=f"{DEVICE}/device.json",
        arrays=arrays(DENSE, f"{MODEL}/tokenize.json", f"{MODEL}/calibrate.json", CURVES, DRAFTER),
    output:
        record=f"{DEVICE}/allocate.json",
        arrays=directory(f"{DEVICE}/allocate"),
    log:
        f"{DEVICE}/logs/allocate.log",
    benchmark:
        f"{DEVICE}/benchmarks/allocate.tsv"
    cache: CACHED
    threads: 8
    resources:
        **needs("allocate"),
    params:
        **commands.params(CONFIG, "allocate", head_as_layers=CONFIG.is_draft or None),
    shell:
        commands.job("allocate")
