rule plan:
    input:
        model=SOURCE,
        sparsity=SPARSITY,
        placement=PLACEMENT,
        layout=f"{DEVICE}/layout.json",
        order=ORDER,
        device=f"{DEVICE}/device.json",
        predictors=PREDICTORS,
        activations=RECALIBRATED,
        corpus=CORPUS,
        drafter=DRAFTER,
        arrays=arrays(SPARSITY, PLACEMENT, ORDER, PREDICTORS, RECALIBRATED, CORPUS, DRAFTER),
    output:
        record=f"{DEVICE}/plan.json",
    log:
        f"{DEVICE}/logs/plan.log",
    benchmark:
        f"{DEVICE}/benchmarks/plan.tsv"
    cache: CACHED
    resources:
        **needs("plan"),
    params:
        **commands.params(CONFIG, "plan"),
    shell:
        commands.job("plan")
