# No stage reads the record, so that a new check reruns no stage (with ancient(), Snakemake 9.27 would miss stages whose
# settings have changed). The job runs first because of its priority, and alone because it takes all cores.
rule preflight:
    input:
        model=f"{MODEL}/ingest.json",
        corpus=CORPUS,
        device=f"{DEVICE}/device.json",
        arrays=arrays(f"{MODEL}/ingest.json", CORPUS),
    output:
        record=f"{DEVICE}/preflight.json",
    log:
        f"{DEVICE}/logs/preflight.log",
    benchmark:
        f"{DEVICE}/benchmarks/preflight.tsv"
    priority: 1
    threads: workflow.cores
    resources:
        **needs("preflight"),
    params:
        code=commands.code(CONFIG, "preflight"),
        settings=lambda wildcards: settings.flags(
            CONFIG,
            "preflight",
            shards=CONFIG["calibration_shards"],
            settings=settings.of_all_stages(CONFIG),
            inputs=inputs_of_rules(),
        ),
        records=commands.records,
    shell:
        commands.job("preflight", "--folder {FOLDER:q} --here {HERE}")
