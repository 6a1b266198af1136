rule report:
    input:
        model=SOURCE,
        corpus="tokenize.json",
        device=f"{DEVICE}/device.json",
        activations=f"{DEVICE}/recalibrate.json",
        sparsity=f"{DEVICE}/allocate.json",
        placement=f"{DEVICE}/place.json",
        order=per_chunk("order"),
        predictors=PREDICTORS,
        layout=f"{DEVICE}/layout.json",
        plans=PLANS,
        package=f"{DEVICE}/publish.json",
        verification=f"{DEVICE}/verify.json",
        curves=CURVES,
    output:
        metrics=f"{DEVICE}/metrics.json",
        html=report(f"{DEVICE}/report.html", category="coldpress"),
    log:
        f"{DEVICE}/logs/report.log",
    benchmark:
        f"{DEVICE}/benchmarks/report.tsv"
    threads: 1
    resources:
        mem_mb=mem_mb("report"),
        runtime=runtime("report"),
    params:
        code=commands.code(CONFIG, "report"),
        settings=commands.settings(CONFIG, "report"),
        records=commands.records,
    shell:
        commands.job("report", "--html {output.html:q}")
