rule tokenize:
    input:
        settings.corpus_files(CONFIG),
        model=f"{MODEL}/ingest.json",
    output:
        f"{MODEL}/tokenize.json",
    log:
        f"{MODEL}/logs/tokenize.log",
    benchmark:
        f"{MODEL}/benchmarks/tokenize.tsv"
    threads: 1
    params:
        code=code("tokenize"),
        settings=flags("tokenize"),
    shell:
        job("tokenize") + " --model {input.model:q} 2> {log:q}"
