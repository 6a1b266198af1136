# No stage reads the record, so that a new check is no reason to run a stage again (with ancient(), snakemake 9.27 would
# miss stages whose settings have changed). It goes first, and alone, by its priority and because it takes all cores.
rule preflight:
    input:
        model="ingest.json",
        corpus="tokenize.json",
        device=f"{DEVICE}/device.json",
    output:
        f"{DEVICE}/preflight.json",
    log:
        f"{DEVICE}/logs/preflight.log",
    benchmark:
        f"{DEVICE}/benchmarks/preflight.tsv"
    priority: 1
    threads: workflow.cores
    resources:
        mem_mb=mem_mb("preflight"),
        runtime=runtime("preflight"),
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
