"""What names mean: which parameter of one checkpoint is which of another.

    names.py            prefixes of wrappers, numbers, and renames by the user
    order.py            in which order the module has its parameters
    ties.py             second names of tied weights
    weights.py          the names of weights that a class of transformers asks for
    peft.py             names of adapters' weights
    families/           names and packings of models in Hugging Face and in Megatron-Core
    saving/             names under which transformers saves what a module calls otherwise
    views.py            tensors that are cut, joined, turned or dealt out of others
    tensor_rules.py     which dimension tensor ranks cut; tensor_families.py for known models
    universal_info.py   the rules of cutting that DeepSpeed's files state; patterns.py: their names
    auto_tp.py          the shares that DeepSpeed's AutoTP gives to tensor ranks

What is known of a model's names is data: tables of JSON, here and in families/ and saving/.
"""
