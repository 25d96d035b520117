// Values out of range, values that contradict each other, and --set.
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

// good.txtpb with one --set; the message must name the setting's path. Bad values never create a
// file.
BadInput value(const std::string& setting, std::vector<std::string> words) {
  words.push_back(setting.substr(0, setting.find('=')));
  return {.name = "--set " + setting,
          .line = "config print good.txtpb --set '" + setting + "'",
          .code = ExitCode::kConfig,
          .words = std::move(words)};
}

std::vector<BadInput> ranges() {
  const std::string sinkhorn = "model.attention.0.group.0.mechanism.sinkhorn.";
  const std::string local = "model.attention.0.group.0.mechanism.block_local.";
  return {
      as_process_too(value("train.steps=0", {"[1, 1000000000000]", "is 0"})),
      value("train.steps=-5", {"is -5"}),
      value("train.steps=1e13", {"[1, 1000000000000]", "is 10000000000000"}),
      value("checkpoint.every=-1e3", {"is -1000"}),
      value("model.layers=1e4", {"[1, 4096]", "is 10000"}),
      value("train.seed=-1e3", {"integer of at least 0"}),
      value("model.layers=010", {"'010' starts with a zero", "octal"}),
      value("model.heads=-08", {"'08' starts with a zero"}),
      value("train.seed=0x10", {"'0x10' is hexadecimal", "decimal"}),
      value("train.clip_norm=00.5", {"starts with a zero"}),
      value("train.global_batch=16.0", {"expected an integer", "'16.0'"}),
      value("train.global_batch=1e10", {"train.global_batch", "10000000000"}),
      value("model.layers=1e-1", {"expected an integer", "'1e-1'"}),
      value("device=gpu", {"'gpu'", "cpu, cuda", "did you mean 'cuda'"}),
      value("device=GPU", {"'GPU'", "did you mean 'cuda'"}),
      value("train.precision=float16", {"'float16'", "did you mean 'fp16'"}),
      value("train.precision=bfloat16", {"did you mean 'bf16'"}),
      value("train.global_batch=0", {"is 0"}),
      value("train.micro_batch=-1", {"is -1"}),
      value("train.clip_norm=-1", {"is -1"}),
      value("train.clip_norm=inf", {"is inf"}),
      value("train.max_skipped=0", {"is 0"}),
      value("train.bucket_elements=0", {"is 0"}),
      value("train.schedule.learning_rate=-0.001", {"is -0.001"}),
      value("train.schedule.learning_rate=nan", {"is nan"}),
      value("train.schedule.warmup_steps=-1", {"is -1"}),
      value("train.optimizer.adamw.beta1=1", {"[0, 1)", "is 1"}),
      value("train.optimizer.adamw.beta2=1.5", {"is 1.5"}),
      value("train.optimizer.adamw.epsilon=0", {"(0, 1]", "is 0"}),
      value("train.optimizer.adamw.weight_decay=-0.1", {"is -0.1"}),
      value("train.optimizer.adafactor.decay_exponent=0", {"is 0"}),
      value("train.optimizer.adafactor.clip_update=0", {"is 0"}),
      value("data.sequence_length=0", {"is 0"}),
      value("data.sequence_length=2000000", {"is 2000000"}),
      value("data.prefetch=0", {"is 0"}),
      value("model.layers=0", {"is 0"}),
      value("model.layers=5000", {"is 5000"}),
      value("model.channels=0", {"is 0"}),
      value("model.heads=0", {"is 0"}),
      value("model.feed_forward=-1", {"is -1"}),
      value("model.norm_epsilon=0", {"is 0"}),
      value("model.dropout.residual=1", {"[0, 1)", "is 1"}),
      value("model.dropout.embedding=-0.5", {"is -0.5"}),
      value(sinkhorn + "block=0", {"is 0"}),
      value(sinkhorn + "temperature=0", {"is 0"}),
      value(sinkhorn + "iterations=1001", {"is 1001"}),
      value(sinkhorn + "max_blocks=-1", {"is -1"}),
      value(local + "look_back=2", {"[0, 1]", "is 2"}),
      value("checkpoint.every=-1", {"is -1"}),
      value("checkpoint.keep=0", {"is 0"}),
      value("mesh.data=-1", {"is -1"}),
      value("evaluate.micro_batch=0", {"is 0"}),
      value("metrics.every=0", {"is 0"}),
  };
}

// Of classifiers, without the language model of good.txtpb.
std::vector<BadInput> classes() {
  const auto of_task = [](const std::string& task, const std::string& more,
                          std::vector<std::string> words) {
    return BadInput{.name = task + " " + more,
                    .line = "config print good.txtpb --set 'task." + task + "' " + more,
                    .code = ExitCode::kConfig,
                    .words = std::move(words)};
  };
  return {
      of_task("classification={ class_weight: 2 }", "",
              {"task.classification.class_weight", "1 value", "2 classes"}),
      of_task("classification={ classes: 3 class_weight: 1 class_weight: 2 }", "",
              {"task.classification.class_weight", "2 values", "3 classes"}),
      of_task("classification={ class_weight: 1 class_weight: 0 }", "",
              {"task.classification.class_weight.1", "(0, 1e6]", "is 0"}),
      of_task("image_classification={ class_weight: 1 class_weight: 1 class_weight: 1 }", "",
              {"task.image_classification.class_weight", "3 values", "2 classes"}),
      of_task("point_sets={ class_weight: 1 }", "",
              {"task.point_sets.class_weight", "1 value", "2 classes"}),
      of_task("classification={ second_stream: \"tokens\" }", "",
              {"task.classification.second_stream", "'tokens'", "first texts"}),
      of_task("classification={ second_stream: \"b\" }",
              "--set data.sequence_length=1 --set model.attention=[{}]",
              {"data.sequence_length", "at least 2", "joined"}),
      value("evaluate.patience=-1", {"is -1"}),
      of_task("language_model={}", "--set evaluate.patience=3 --set evaluate.every=0",
              {"evaluate.patience", "3", "evaluate.every 0"}),
  };
}

std::vector<BadInput> contradictions() {
  const std::string sinkhorn = "model.attention.0.group.0.mechanism.sinkhorn.";
  return {
      value("model.channels=17", {"17", "2 heads"}),
      {.name = "sinusoidal positions of an odd width",
       .line = "config print good.txtpb --set model.positions=sinusoidal --set model.channels=15 "
               "--set model.heads=1",
       .code = ExitCode::kConfig,
       .words = {"model.channels", "even", "15"}},
      {.name = "too few heads in the groups",
       .line = "config print good.txtpb --set model.attention.0.group.0.heads=1",
       .code = ExitCode::kConfig,
       .words = {"model.attention.0", "1 head together", "model.heads is 2"}},
      {.name = "too many heads in the groups",
       .line = "config print good.txtpb --set model.attention.0.group.0.heads=3",
       .code = ExitCode::kConfig,
       .words = {"model.attention.0", "3 heads", "model.heads is 2"}},
      {.name = "a head group without heads left",
       .line = "config print good.txtpb --set model.attention.0.group.0.heads=2 --set "
               "model.attention.0.group.1={}",
       .code = ExitCode::kConfig,
       .words = {"model.attention.0.group.1.heads", "no heads are left"}},
      {.name = "an encoder without a second sequence",
       .line = "config print good.txtpb --set model.encoder.layers=2",
       .code = ExitCode::kConfig,
       .words = {"model.encoder", "only task.translation", "remove model.encoder"}},
      value(sinkhorn + "block=5", {"32", "5", "multiple"}),
      value(sinkhorn + "max_blocks=3", {"3", "4 blocks"}),
      {.name = "prefix balance of too many blocks",
       .line = "config print good.txtpb --set data.sequence_length=4096",
       .code = ExitCode::kConfig,
       .words = {"causal_balance", "256", "512"}},
      value("train.micro_batch=5", {"5", "global_batch 4"}),
      value("train.schedule.final_learning_rate=1", {"1", "learning_rate"}),
      {.name = "rsqrt without warm-up",
       .line = "config print good.txtpb --set train.schedule.shape=rsqrt --set "
               "train.schedule.warmup_steps=0",
       .code = ExitCode::kConfig,
       .words = {"warmup_steps", "rsqrt"}},
      {.name = "step decay without epochs",
       .line = "config print good.txtpb --set train.schedule.shape=step_decay",
       .code = ExitCode::kConfig,
       .words = {"train.schedule.decay_epoch", "is empty", "shape constant"}},
      value("train.schedule.decay_epoch=[3]", {"no effect with shape", "shape step_decay"}),
      {.name = "decay epochs that do not ascend",
       .line = "config print good.txtpb --set train.schedule.shape=step_decay --set "
               "train.schedule.decay_epoch=[4,4]",
       .code = ExitCode::kConfig,
       .words = {"train.schedule.decay_epoch.1", "4 is not above 4", "ascending"}},
      {.name = "decay in epoch 0",
       .line = "config print good.txtpb --set train.schedule.shape=step_decay --set "
               "train.schedule.decay_epoch=[0]",
       .code = ExitCode::kConfig,
       .words = {"train.schedule.decay_epoch.0", "must be in [1, ", "is 0"}},
      {.name = "a decay longer than the run",
       .line = "config print good.txtpb --set train.schedule.shape=warmup_stable_decay --set "
               "train.schedule.decay_steps=1000000",
       .code = ExitCode::kConfig,
       .words = {"train.schedule.decay_steps", "1000000", "the peak is never reached"}},
      {.name = "a rule for names of no model",
       .line = "config print good.txtpb --set 'train.warm_start.rename=[\"a=b\"]'",
       .code = ExitCode::kConfig,
       .words = {"train.warm_start.rename.0", "no effect without train.warm_start.from"}},
      {.name = "a rule for names without a mark",
       .line = "config print good.txtpb --set train.warm_start.from=run --set "
               "'train.warm_start.rename=[\"a.\"]'",
       .code = ExitCode::kConfig,
       .words = {"train.warm_start.rename.0", "'a.' is not A=B"}},
      {.name = "a schedule that ends in its warm-up",
       .line = "config print good.txtpb --set train.schedule.warmup_steps=9 --set "
               "train.schedule.steps=9",
       .code = ExitCode::kConfig,
       .words = {"train.schedule.steps", "9 leaves nothing between", "warmup_steps 9"}},
      value("train.batch_tokens=128",
            {"train.batch_tokens", "samples differ in length", "classification"}),
      {.name = "fewer tokens per step than a sample has",
       .line = "config print good.txtpb --set task.classification={} --set train.batch_tokens=31",
       .code = ExitCode::kConfig,
       .words = {"train.batch_tokens", "31 is less than one sample", "data.sequence_length 32"}},
      {.name = "tokens and samples per step",
       .line = "config print good.txtpb --set task.classification={} --set train.batch_tokens=320",
       .code = ExitCode::kConfig,
       .words = {"train.global_batch", "4 is not 10", "leave it out"}},
      {.name = "virtual shards of tokens",
       .line =
           "config print good.txtpb --set task.classification={} --set train.batch_tokens=128 --set train.invariant.shards=2",
       .code = ExitCode::kConfig,
       .words = {"train.invariant.shards", "must be 0 with train.batch_tokens"}},
      {.name = "a recorded step of tokens",
       .line =
           "config print good.txtpb --set task.classification={} --set train.batch_tokens=128 --set train.cuda_graph=true",
       .code = ExitCode::kConfig,
       .words = {"train.cuda_graph", "must be false with train.batch_tokens"}},
      {.name = "cutoffs that do not ascend",
       .line = "config print good.txtpb --set model.adaptive_softmax.cutoff=[7,7]",
       .code = ExitCode::kConfig,
       .words = {"model.adaptive_softmax.cutoff.1", "7 is not above 7", "ascending"}},
      {.name = "a tail without channels",
       .line =
           "config print good.txtpb --set model.adaptive_softmax.cutoff=[3,7] --set model.adaptive_softmax.divisor=4096",
       .code = ExitCode::kConfig,
       .words = {"model.adaptive_softmax.divisor", "4096 is too large for model.channels",
                 "1 tail"}},
      {.name = "parts of an undivided vocabulary",
       .line = "config print good.txtpb --set model.adaptive_softmax.divisor=2",
       .code = ExitCode::kConfig,
       .words = {"model.adaptive_softmax.divisor",
                 "has no effect without model.adaptive_softmax.cutoff"}},
      {.name = "tied projections of an undivided vocabulary",
       .line = "config print good.txtpb --set model.adaptive_softmax.tie_projections=true",
       .code = ExitCode::kConfig,
       .words = {"model.adaptive_softmax.tie_projections",
                 "has no effect without model.adaptive_softmax.cutoff"}},
      {.name = "adaptive softmax of a classifier",
       .line =
           "config print good.txtpb --set task.classification={} --set model.adaptive_softmax.cutoff=[3,7]",
       .code = ExitCode::kConfig,
       .words = {"model.adaptive_softmax.cutoff", "is for task.language_model"}},
      {.name = "adaptive softmax and a factorized embedding",
       .line =
           "config print good.txtpb --set model.adaptive_softmax.cutoff=[3,7] --set model.embedding_channels=4",
       .code = ExitCode::kConfig,
       .words = {"model.embedding_channels", "must be 0 with model.adaptive_softmax"}},
      {.name = "a tied table without parts",
       .line =
           "config print good.txtpb --set model.adaptive_softmax.cutoff=[3,7] --set model.adaptive_softmax.inputs=false",
       .code = ExitCode::kConfig,
       .words = {"model.tie_embeddings",
                 "must be false with model.adaptive_softmax.inputs: false"}},
      {.name = "tied projections of untied tables",
       .line =
           "config print good.txtpb --set model.adaptive_softmax.cutoff=[3,7] --set model.adaptive_softmax.tie_projections=true --set model.tie_embeddings=false",
       .code = ExitCode::kConfig,
       .words = {"model.adaptive_softmax.tie_projections",
                 "needs model.adaptive_softmax.inputs and model.tie_embeddings"}},
      {.name = "tied projections that do not exist",
       .line =
           "config print good.txtpb --set model.adaptive_softmax.cutoff=[3,7] --set model.adaptive_softmax.tie_projections=true --set model.adaptive_softmax.divisor=1",
       .code = ExitCode::kConfig,
       .words = {"model.adaptive_softmax.tie_projections",
                 "has no effect with model.adaptive_softmax.divisor 1"}},
      {.name = "adaptive softmax on a tensor axis",
       .line =
           "config print good.txtpb --set model.adaptive_softmax.cutoff=[3,7] --set mesh.tensor=2",
       .code = ExitCode::kConfig,
       .words = {"mesh.tensor", "must be 1 with model.adaptive_softmax", "train.zero_stage"}},
      {.name = "a recorded step with adaptive softmax",
       .line =
           "config print good.txtpb --set model.adaptive_softmax.cutoff=[3,7] --set train.cuda_graph=true --set device=cuda",
       .code = ExitCode::kConfig,
       .words = {"train.cuda_graph", "must be false with model.adaptive_softmax"}},
      {.name = "a feed-forward width without feed-forward sublayers",
       .line = "config print good.txtpb --set model.attention_only=true --set "
               "model.feed_forward=64",
       .code = ExitCode::kConfig,
       .words = {"model.feed_forward", "64 has no effect with model.attention_only"}},
      {.name = "an activation without feed-forward sublayers",
       .line = "config print good.txtpb --set model.attention_only=true --set "
               "model.activation=relu",
       .code = ExitCode::kConfig,
       .words = {"model.activation", "relu has no effect with model.attention_only"}},
      {.name = "fp64 on a GPU",
       .line = "config print good.txtpb --set device=cuda --set train.precision=fp64",
       .code = ExitCode::kConfig,
       .words = {"train.precision", "fp64 needs device: cpu"}},
      {.name = "ZeRO with factored optimizer state",
       .line =
           "config print good.txtpb --set train.zero_stage=1 --set train.optimizer.adafactor={}",
       .code = ExitCode::kConfig,
       .words = {"train.zero_stage", "must be 0 with train.optimizer.adafactor"}},
      {.name = "Nesterov's momentum of 0",
       .line = "config print good.txtpb --set 'train.optimizer.sgd={momentum: 0 nesterov: true}'",
       .code = ExitCode::kConfig,
       .words = {"train.optimizer.sgd.nesterov", "no effect", "momentum 0"}},
      value("train.cuda_graph=true", {"needs device: cuda"}),
      {.name = "a CUDA graph of updates that read the host",
       .line = "config print good.txtpb --set device=cuda --set train.cuda_graph=true --set "
               "train.optimizer.adafactor={}",
       .code = ExitCode::kConfig,
       .words = {"train.cuda_graph", "must be false with train.optimizer.adafactor"}},
      {.name = "a CUDA graph over virtual shards",
       .line = "config print good.txtpb --set device=cuda --set train.cuda_graph=true --set "
               "train.invariant.shards=2",
       .code = ExitCode::kConfig,
       .words = {"train.cuda_graph", "must be false with train.invariant.shards"}},
      {.name = "a CUDA graph with keys of one document",
       .line = "config print good.txtpb --set device=cuda --set train.cuda_graph=true --set "
               "data.restart_at_documents=true --set "
               "model.attention.0.group.0.mechanism.moba.block=8",
       .code = ExitCode::kConfig,
       .words = {"train.cuda_graph", "must be false with data.restart_at_documents",
                 "group.0.mechanism.moba"}},
      {.name = "a value without effect",
       .line = "train good.txtpb --run new --set train.schedule.shape=constant --set "
               "train.schedule.final_learning_rate=1e-5",
       .code = ExitCode::kConfig,
       .words = {"train.schedule.final_learning_rate", "1e-05 has no effect unless shape is cosine",
                 "leave it at its default, 0.0001"}},
      value("mesh.tensor=7", {"mesh.tensor", "7 does not divide model.feed_forward"}),
      value("mesh.sequence=2", {"not supported yet", "2"}),
      value("evaluate.split=train", {"valid", "test", "'train'"}),
  };
}

// Contexts longer than a sequence.
std::vector<BadInput> contexts() {
  const auto row = [](std::string name, const std::string& settings,
                      std::vector<std::string> words) {
    return BadInput{.name = std::move(name),
                    .line = "config print good.txtpb " + settings,
                    .code = ExitCode::kConfig,
                    .words = std::move(words)};
  };
  const std::string memory =
      "--set model.positions=relative_sinusoidal --set model.memory.length=8 ";
  return {
      value("evaluate.stride=33", {"33 is above data.sequence_length 32"}),
      value("evaluate.stride=-1", {"is -1"}),
      value("model.memory.length=-1", {"is -1"}),
      value("model.memory.length=8", {"needs model.positions: relative_sinusoidal"}),
      row("relative positions of a classifier",
          "--set task.classification={} --set model.positions=relative_sinusoidal",
          {"model.positions", "task.language_model"}),
      row("a memory across documents", memory + "--set data.restart_at_documents=true",
          {"model.memory.length", "must be 0 with data.restart_at_documents"}),
      row("a memory in a CUDA graph", memory + "--set device=cuda --set train.cuda_graph=true",
          {"model.memory.length", "must be 0 with train.cuda_graph"}),
      row("a divided memory", memory + "--set mesh.tensor=2",
          {"model.memory.length", "must be 0 with mesh.tensor 2"}),
      row("a memory and a stride", memory + "--set evaluate.stride=8",
          {"evaluate.stride", "must be 0 with model.memory.length"}),
      row("longer sequences in evaluation",
          memory + "--set model.memory.evaluation_sequence_length=33",
          {"model.memory.evaluation_sequence_length", "33 is above data.sequence_length 32"}),
  };
}

std::vector<BadInput> settings() {
  const std::string print = "config print good.txtpb --set ";
  const auto set = [&](std::string name, const std::string& setting,
                       std::vector<std::string> words) {
    return BadInput{.name = "--set " + name,
                    .line = print + "'" + setting + "'",
                    .code = ExitCode::kConfig,
                    .words = std::move(words)};
  };
  return {
      set("without an equals sign", "train.steps", {"--set train.steps", "path=value"}),
      set("without a path", "=5", {"--set =5", "path=value"}),
      set("without a value", "train.steps=", {"train.steps", "missing"}),
      set("an unknown message", "trainer.steps=5", {"'trainer'", "did you mean 'train'"}),
      set("an unknown field", "train.stepz=5", {"'stepz'", "did you mean 'steps'"}),
      set("a field below a value", "train.steps.more=1", {"'train.steps' is a value"}),
      set("an empty step in the path", "train..steps=1", {"''"}),
      set("a path that ends in a dot", "train.=1", {"''"}),
      set("a message to a word", "task=language_model", {"task is a message", "language_model"}),
      set("a list to a word", "model.attention=dense", {"model.attention is a list"}),
      set("an entry beyond the list", "model.attention.5.group.0.heads=2",
          {"'5' is not an index", "0 to 1"}),
      set("an entry of a list of values", "train.schedule.decay_epoch.0=3",
          {"decay_epoch is a list of values", "train.schedule.decay_epoch=[...]"}),
      set("a value for a list of values", "train.schedule.decay_epoch=3",
          {"train.schedule.decay_epoch is a list", "[..., ...]"}),
      set("an entry by name", "model.attention.first.group.0.heads=2", {"'first' is not an index"}),
      set("an include", "include=good.txtpb", {"include belongs in a file"}),
      set("two values", "train.steps=1 steps: 2", {"train.steps"}),
      set("a word for a number", "train.steps=many", {"train.steps", "integer", "'many'"}),
      set("an unknown choice", "model.attention.0.group.0.mechanism.sparse.block=4",
          {"'sparse'", "mechanism"}),
      set("a message with a brace too few", "model.dropout={residual: 0.1", {"model.dropout"}),
      {.name = "--set with a control character",
       .code = ExitCode::kConfig,
       .words = {"data.corpus", "control character"},
       .arguments = {"config", "print", "good.txtpb", "--set", "data.corpus=a\nb"}},
  };
}

std::vector<BadInput> of_train() {
  const auto train = [](std::string name, const std::string& settings, ExitCode code,
                        std::vector<std::string> words) {
    return BadInput{.name = "train " + name,
                    .line = "train good.txtpb --run new " + settings,
                    .code = code,
                    .words = std::move(words)};
  };
  return {
      train("without a corpus", "--set data.corpus=", ExitCode::kConfig,
            {"data.corpus is not set", "birkhoff prepare"}),
      train("on a missing corpus", "--set data.corpus=nowhere", ExitCode::kData,
            {"nowhere", "birkhoff prepare"}),
      train("on a run as its corpus", "--set data.corpus=run", ExitCode::kData,
            {"run", "manifest.json"}),
      train("on a file as its corpus", "--set data.corpus=text/one.txt", ExitCode::kData,
            {"text/one.txt"}),
      as_process_too(train("pairs from a corpus of one stream", "--set task.translation={}",
                           ExitCode::kData, {"corpus", "source"})),
      train("classification of a corpus without labels", "--set task.classification={}",
            ExitCode::kData, {"corpus", "record 'label'", "--label-column"}),
      train("for another number of ranks", "--set mesh.data=3", ExitCode::kConfig,
            {"mesh: data 3", "1 rank"}),
      train("in nodes of another size", "--ranks 2 --set mesh.ranks_per_node=3", ExitCode::kConfig,
            {"mesh.ranks_per_node: 3", "2 data-parallel ranks"}),
      train("for another number of supervised ranks", "--ranks 2 --set mesh.data=3",
            ExitCode::kConfig, {"mesh: data 3", "2 ranks"}),
      as_process(train("a stream the corpus has not", "--set task.language_model.stream=letters",
                       ExitCode::kData, {"letters", "it has: tokens"})),
      as_process(train("sequences longer than the text",
                       "--set data.sequence_length=8192 --set model.attention=[{}]",
                       ExitCode::kData, {"8192", "sequence_length"})),
  };
}

}  // namespace

std::vector<BadInput> bad_config_values() {
  std::vector<BadInput> rows;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // Memory is limited, so that no machine can allocate the first matrix, of 12 GiB. Sanitizers need
  // terabytes of addresses.
  rows.push_back({.name = "train larger than the memory",
                  .line = "train good.txtpb --run new --set model.channels=32768 "
                          "--set model.attention=[{}]",
                  .code = ExitCode::kMemory,
                  .words = {"out of memory", "data.sequence_length"},
                  .where = Where::kProcess,
                  .shell = "ulimit -v 8000000"});
#endif
  for (auto table : {ranges, classes, contradictions, contexts, settings, of_train}) {
    for (BadInput& row : table()) rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace birkhoff
