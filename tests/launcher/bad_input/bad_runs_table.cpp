// Runs that `train` cannot resume. It has started MPI by then, which a process can do only once, so
// the rows run as real processes.
#include <limits>
#include <memory>

#include "configs/schema/checkpoint_manifest.pb.h"
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

const std::string kResume = "train good.txtpb --run run --set train.steps=6";

BadInput resume(std::string name, ExitCode code, std::vector<std::string> words,
                std::function<void()> spoil, const std::string& settings = "") {
  return {.name = "resume: " + name,
          .line = kResume + (settings.empty() ? "" : " --set " + settings),
          .code = code,
          .words = std::move(words),
          .spoil = std::move(spoil),
          .where = Where::kProcess};
}

BadInput start(std::string name, const std::string& run, ExitCode code,
               std::vector<std::string> words, std::function<void()> spoil = {}) {
  return {.name = "start: " + name,
          .line = "train good.txtpb --run " + run,
          .code = code,
          .words = std::move(words),
          .spoil = std::move(spoil),
          .where = Where::kProcess};
}

void flip_models() {
  for (const char* step : {"run/checkpoints/step-00000002", "run/checkpoints/step-00000004"})
    flip_bit(checkpoint_file(step, "model-"), -1);
}

void forge_both() {
  for (const char* step : {"run/checkpoints/step-00000002", "run/checkpoints/step-00000004"})
    forge_tensor(step, checkpoint_file(step, "optimizer-"), "adamw.v/embedding.weight",
                 std::numeric_limits<float>::infinity(), 1);
}

void edit_both(const std::function<void(configs::CheckpointManifest&)>& edit) {
  for (const char* step : {"run/checkpoints/step-00000002", "run/checkpoints/step-00000004"})
    edit_checkpoint(step, edit);
}

}  // namespace

std::vector<BadInput> bad_runs() {
  using enum ExitCode;
  return {
      resume("all checkpoints damaged", kCheckpoint,
             {"run/checkpoints", "no valid checkpoint", "--fresh"}, flip_models),
      resume("checkpoints gone", kCheckpoint, {"run/checkpoints", "none is left", "--fresh"},
             [] { remove_one("run/checkpoints"); }),
      resume("checkpoints of another version", kCheckpoint, {"version 3", "reads versions 1 to 2"},
             [] { edit_both([](auto& m) { m.set_version(3); }); }),
      resume("checkpoints of another run", kCheckpoint, {"belongs to run ffff"},
             [] { edit_both([](auto& m) { m.set_run(std::string(32, 'f')); }); }),
      resume("run.json of another run", kCheckpoint, {"belongs to run", "this folder is run"},
             [] {
               const std::string text = read_bytes("run/run.json");
               const std::size_t id = text.find("\"id\":\"") + 6;
               replace_text("run/run.json", text.substr(id, 32), std::string(32, 'e'));
             }),
      resume("run.json missing", kUsage, {"run", "run.json", "--run"},
             [] { remove_one("run/run.json"); }),
      resume("run.json damaged", kCheckpoint, {"run/run.json", "damaged"},
             [] { truncate_to("run/run.json", 20); }),
      resume("run.json of another version", kCheckpoint, {"run/run.json", "version"},
             [] { replace_text("run/run.json", "\"version\":1", "\"version\":9"); }),
      resume("locked by another job", kUsage, {"run folder run", "in use by process"},
             [] {
               static std::unique_ptr<FileLock> lock;
               lock = std::make_unique<FileLock>("run/lock", "the run folder");
             }),
      resume("another seed", kConfig, {"train.seed: 1 -> 2", "fixed"}, {}, "train.seed=2"),
      resume("another batch", kConfig, {"train.global_batch: 4 -> 8"}, {}, "train.global_batch=8"),
      resume("another sequence length", kConfig, {"data.sequence_length: 32 -> 16"}, {},
             "data.sequence_length=16"),
      resume("more layers", kConfig, {"model.layers: 1 -> 2"}, {}, "model.layers=2"),
      resume("another optimizer", kConfig, {"train.optimizer.adamw", "adafactor"}, {},
             "train.optimizer.adafactor={}"),
      resume("another corpus", kData, {"made with the corpus", "other"}, {}, "data.corpus=other"),
      resume("metrics damaged", kStorage, {"run/metrics.jsonl:2", "not a line of metrics"},
             [] { replace_text("run/metrics.jsonl", "\n{\"step\"", "\n[\"step\""); }),
      resume("adafactor's state asked for as a whole", kConfig,
             {"fixed fields", "train.optimizer.adafactor: (absent) -> "}, {},
             "'train.optimizer={adafactor{clip_update:2}}'"),
      resume("only checkpoints of a diverged run", kCheckpoint,
             {"run/checkpoints", "diverged-step-*", "--fresh"},
             [] { edit_both([](auto& m) { m.set_skipped(3); }); }),
      resume("only checkpoints with values that are not finite", kCheckpoint,
             {"no valid checkpoint is left", "diverged-step-*"}, forge_both),
      start("a run that only diverges",
            "new --set train.schedule.learning_rate=1e30 --set "
            "train.steps=15 --set train.clip_norm=0",
            kNumerical,
            {"step 15: training ends", "No checkpoint predates the divergence", "start again"}),
      start("run folder a file", "good.txtpb", kUsage, {"good.txtpb", "not a folder"}),
      start("run folder under a file", "good.txtpb/run", kStorage, {"good.txtpb", "File exists"}),
      start("run folder in /proc", "/proc/birkhoff", kStorage, {"/proc/birkhoff"}),
      start("run folder of other things", "text", kUsage, {"text", "not empty", "run.json"}),
      start("run folder a corpus", "corpus", kUsage, {"corpus", "not empty", "run.json"}),
      start("run folder with a name too long", std::string(300, 'r'), kStorage,
            {"File name too long"}),
      start("a folder where its lock should be", "new", kStorage, {"new/lock"},
            [] { std::filesystem::create_directories("new/lock"); }),
      start("a page of tokens damaged", "new", kData, {"train-tokens-0000", "damaged"},
            [] {
              for (int i = 0; i < 4; ++i) {
                std::string file = "corpus/train-tokens-0000" + std::to_string(i) + ".h5";
                std::string bytes = read_bytes(file);
                // HDF5 may put the values anywhere, so damage all but the first and last kilobyte.
                for (std::size_t at = 1024; at + 1024 < bytes.size(); at += 2) bytes[at] ^= 1;
                write_bytes(file, bytes);
              }
            }),
      start("learning rate that gives no numbers",
            "new --set train.schedule.learning_rate=1e30 --set train.non_finite=stop --set "
            "train.steps=50 --set train.clip_norm=0",
            kNumerical, {"not finite", "learning_rate"}),
  };
}

}  // namespace birkhoff
