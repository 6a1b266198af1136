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
    threads: 1024
    params:
        code=code("preflight"),
        settings=flags(
            "preflight",
            distill=CONFIG["distill"],
            shards=CONFIG["calibration_shards"],
            settings=settings.of_all_stages(CONFIG),
        ),
    shell:
        job("preflight") + " --folder {FOLDER:q} --jobs {AT_A_TIME} --model {input.model:q} --corpus {input.corpus:q}"
        " --device {input.device:q} --threads {threads} 2> {log:q}"
