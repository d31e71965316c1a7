"""What names mean: which parameter of one checkpoint is which of another.

    names.py            prefixes of wrappers, numbers, and renames by the user
    order.py            in which order the module has its parameters
    ties.py             second names of tied weights
    peft.py             names of adapters' weights
    families/           names and packings of models in Hugging Face and in Megatron-Core
    saving/             names under which transformers saves what a module calls otherwise
    views.py            tensors that are cut, joined, turned or dealt out of others
    patterns.py         patterns of names by which DeepSpeed knows how tensor ranks cut a model
    tensor_rules.py     which dimension tensor ranks cut; tensor_families.py for known models

What is known of a model's names is data: tables of JSON in families/ and saving/.
"""
