"""What names mean: matches the parameters of one checkpoint with those of another.

    names.py            prefixes of wrappers, numbers, and renames by the user
    order.py            the order of the module's parameters
    ties.py             second names of tied weights
    weights.py          the names of weights that a class of transformers asks for
    peft.py             names of adapters' weights
    families/           names and packings of models in Hugging Face and in Megatron-Core
    saving/             names under which transformers saves modules' weights
    views.py            tensors that are cut, joined, turned or dealt out of others
    tensor_rules.py     which dimension tensor ranks cut; tensor_families.py for known models
    universal_info.py   the rules of cutting that DeepSpeed's files state; patterns.py: their names
    auto_tp.py          the shares that DeepSpeed's AutoTP gives to tensor ranks

Knowledge about a model's names is data: JSON tables, here and in families/ and saving/.
"""
