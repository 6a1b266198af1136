rule plan:
    input:
        model=SOURCE,
        sparsity=f"{DEVICE}/allocate.json",
        placement=f"{DEVICE}/place.json",
        layout=f"{DEVICE}/layout.json",
        order=per_chunk("order"),
        device=f"{DEVICE}/device.json",
        predictors=PREDICTORS,
        activations=f"{DEVICE}/recalibrate.json",
        corpus=f"{MODEL}/tokenize.json",
        drafter=DRAFTER,
        arrays=arrays(
            f"{DEVICE}/allocate.json",
            f"{DEVICE}/place.json",
            per_chunk("order"),
            PREDICTORS,
            f"{DEVICE}/recalibrate.json",
            f"{MODEL}/tokenize.json",
            DRAFTER,
        ),
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
