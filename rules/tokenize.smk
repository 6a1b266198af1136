CORPUS_FILES = checked(inputs.corpus_files, CONFIG)


rule tokenize:
    input:
        local(inputs.declared(CORPUS_FILES)),
        model=f"{MODEL}/ingest.json",
        arrays=arrays(f"{MODEL}/ingest.json"),
    output:
        record=f"{MODEL}/tokenize.json",
        arrays=directory(f"{MODEL}/tokenize"),
    log:
        f"{MODEL}/logs/tokenize.log",
    benchmark:
        f"{MODEL}/benchmarks/tokenize.tsv"
    cache: CACHED
    localrule: STORED
    resources:
        **needs("tokenize"),
    params:
        **commands.params(CONFIG, "tokenize", corpus=None),
        files=inputs.stamps(CONFIG, CORPUS_FILES),
        text=inputs.corpus(CONFIG, CORPUS_FILES),
    shell:
        commands.job("tokenize", "--corpus {CONFIG[corpus]:q}")
