"""Experiments from files: cells run once, kept as JSON lines, shown as tables beside the papers' own.

An experiment (`config`) is read from a TOML file (`reading`) and run cell by cell (`runner`, `cells`).
`load_run(folder)` gives its finished cells; tables, figures and the report read them as `observations`.

One line of RUN/cells.jsonl is one JSON object:

    key         SHA-256 of everything that determines the result, the dataset by its contents
    cell        the same with the dataset by its address
    experiment  name of the experiment; title: its title; time: when the cell was finished (UTC)
    dataset     {name, address, backbone, limit_train, limit_test, random, key, rows, test_rows,
                features, classes}
    partition   {name, kind, clients, min_size, the kind's option, heterogeneity, empty_clients, classes (by
                name); class_counts: rows of each client and class, for the experiment's first seed}
    method      label of the method; algorithm: its key (as `fedsolve methods` lists them, law, local,
                fedavg-numpy)
    parameters  all parameters of the method but the seed; grid: those that the file varies
    depths      layers that tables read the model at; the last one where the list is empty
    noise       share of flipped training labels; seed: of partition, noise and method
    accuracy, train_accuracy            of the final model, shares of one; test_rows
    hits        which test rows are right, a bit for each in base64, by the layers that tables read ("" where
                there are none); null where accuracy is no share of them: a mean over clients or rounds, or a
                best round, which the test rows chose
    accuracy_per_layer, train_accuracy_per_layer, risk, separability,
    seconds_per_layer, exchanges_per_layer, bytes_up_per_layer, bytes_down_per_layer
                lists over layers 0 to T (cumulative where they are costs), null where there are none;
                separability is {train: [{csr, ifs, dm}, ...], test: ...}, null unless asked for
    exchanges, bytes_up, bytes_down, seconds        of the whole training, without evaluation
    accuracy_per_round, loss_per_round, drift_per_round         of gradient methods, absent for others
    representation_per_round    {intra, inter, ratio}, lists over rounds, where it was asked for
    feedback    of gradient methods with feedback alignment: {layers, rounds, first, mean}, lists over layers
                in the order in which they run: how many rounds each was chosen in, and its alignment z in
                the first round and on average (null where layers were named, not chosen)
    measures    other numbers by name: local_best, local_mean, deviation, singular, drift, best_round,
                tail_rounds, intra, inter, ratio (over the last tenth of the rounds), worst_decile, pooled,
                gain_shared, gain_alone
    local       of cells measured client by client, where accuracy is the mean of local accuracies, null
                otherwise: {rows, correct, shared, alone, balances}, lists over clients; shared and alone are
                correct predictions of the shared model and of each client's own rows by themselves
    versions, machine                   what it ran on; with torch, and a GPU, where it trained networks
"""
