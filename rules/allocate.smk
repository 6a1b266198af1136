rule allocate:
    input:
        model=DENSE,
        corpus=CORPUS,
        activations=CALIBRATED,
        curves=CURVES,
        drafter=DRAFTER,
        device=f"{DEVICE}/device.json",
        arrays=arrays(DENSE, CORPUS, CALIBRATED, CURVES, DRAFTER),
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
