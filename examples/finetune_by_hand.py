"""What `distir finetune` does, step by step: python finetune_by_hand.py MODEL CHATS HELD_OUT RESULT [LORA_RANK].

For another loss, other data or another optimizer. Ranks are threads; `distir chat RESULT` talks to the result.
"""

import sys

import torch
import transformers

import distir_relax as dr
from distir_relax.integrations.adapters import adapt, merge
from distir_relax.integrations.chats import read_chats

EPOCHS, BATCH, LENGTH, UNLABELED = 3, 8, 128, -100


def rows(path, tokenizer):
    """Return a data set of conversations: rows of LENGTH tokens, whose labels are the assistant's tokens alone."""

    def tokens(messages, begins_reply):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=begins_reply, return_dict=False)

    inputs, targets = [], []
    for chat in read_chats(path):
        labels = []
        for number, message in enumerate(chat):
            if message["role"] == "assistant":
                before, after = tokens(chat[:number], True), tokens(chat[: number + 1], False)
                labels += [UNLABELED] * (len(before) - len(labels)) + after[len(before) :]
        inputs.append((tokens(chat, False) + [tokenizer.eos_token_id or 0] * LENGTH)[:LENGTH])
        targets.append((labels + [UNLABELED] * LENGTH)[:LENGTH])
    return torch.utils.data.StackDataset(input_ids=torch.tensor(inputs), labels=torch.tensor(targets))


source, chats, held_out, result, *rank = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(source)
model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
model.config.use_cache = False
if rank:  # low-rank adapters in place of all weights
    adapt(model, int(rank[0]))
data, others = rows(chats, tokenizer), rows(held_out, tokenizer)
steps = EPOCHS * (len(data) // BATCH)
step = dr.compile_training(
    model,
    optimizer=dr.optim.AdamW(dr.lr.Linear(2e-4 if rank else 2e-5, steps + 1, warmup=steps // 10), weight_decay=0.01),
    example_batch=torch.utils.data.default_collate([data[number] for number in range(BATCH)]),
    strategy="2/1/1/1",
    precision="bf16",
    clip_norm=1.0,
    metrics={},
)
dr.train(step, data, epochs=EPOCHS, evaluation=others, evaluate_every="epoch", callbacks=[dr.callbacks.Progress()])
step.copy_to_model(model)
if rank:
    merge(model)
model.save_pretrained(result)
tokenizer.save_pretrained(result)
