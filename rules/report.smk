LLAMA_BENCH_FILES = inputs.given_files(CONFIG, "llama_bench")


rule report:
    input:
        local(inputs.declared(LLAMA_BENCH_FILES)),
        model=SOURCE,
        corpus=CORPUS,
        device=f"{DEVICE}/device.json",
        activations=RECALIBRATED,
        sparsity=SPARSITY,
        placement=PLACEMENT,
        order=ORDER,
        predictors=PREDICTORS,
        layout=f"{DEVICE}/layout.json",
        plans=PLANS,
        package=local(f"{DEVICE}/publish.json"),
        verification=local(f"{DEVICE}/verify.json"),
        curves=CURVES,
        arrays=arrays(RECALIBRATED, SPARSITY, PLACEMENT, ORDER, PREDICTORS, CURVES),
    output:
        metrics=local(f"{DEVICE}/metrics.json"),
        html=report(local(f"{DEVICE}/report.html"), category="coldpress"),
    log:
        f"{DEVICE}/logs/report.log",
    benchmark:
        f"{DEVICE}/benchmarks/report.tsv"
    localrule: STORED
    resources:
        **needs("report"),
    params:
        **commands.params(CONFIG, "report"),
        files=inputs.stamps(CONFIG, LLAMA_BENCH_FILES),
    shell:
        commands.job("report", "--html {output.html:q}")
