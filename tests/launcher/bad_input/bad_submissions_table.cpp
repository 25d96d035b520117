// Command lines of submit, status, tail and cancel, and site profiles, that cannot be followed.
#include "tests/launcher/bad_input/bad_input.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {
namespace {

// `submit good.txtpb --run new --site site.txtpb` and more, with this site profile.
BadInput submission(std::string name, const std::string& more, std::vector<std::string> words,
                    ExitCode code = ExitCode::kUsage, const std::string& site = "") {
  return {
      .name = "submit " + name,
      .line = "submit good.txtpb --run new --site site.txtpb" + (more.empty() ? "" : " " + more),
      .code = code,
      .words = std::move(words),
      .spoil = [site] { write_bytes("site.txtpb", site); }};
}

BadInput usage(std::string name, std::string line, std::vector<std::string> words) {
  return {.name = std::move(name),
          .line = std::move(line),
          .code = ExitCode::kUsage,
          .words = std::move(words)};
}

std::vector<BadInput> flags() {
  return {
      usage("submit without a profile", "submit good.txtpb --run new", {"--site", "required"}),
      usage("submit without --run", "submit good.txtpb --site site.txtpb", {"--run", "required"}),
      submission("--nodes 0", "--nodes 0", {"--nodes", "1 to 65536"}),
      submission("--nodes of too many ranks", "--nodes 5000", {"--nodes 5000", "4096 ranks"}),
      submission("--spare-nodes of all nodes", "--nodes 2 --spare-nodes 2",
                 {"--spare-nodes 2", "--nodes 2"}),
      submission("--min-ranks above the ranks", "--nodes 2 --min-ranks 3",
                 {"--min-ranks 3", "2 ranks of 2 nodes"}),
      submission("its former name --least-ranks", "--nodes 2 --least-ranks 3",
                 {"--min-ranks 3", "2 ranks of 2 nodes"}),
      submission("--time of words", "--time soon", {"--time 'soon'", "hours:minutes:seconds"}),
      submission("--time of nothing", "--time 0", {"--time '0'"}),
      submission("--time that the signal fills", "--time 2", {"2:00", "signal_seconds 120"}),
      submission("--exclude-file that is missing", "--exclude-file none", {"none", "No such file"},
                 ExitCode::kStorage),
      submission("--exclude-file of another kind", "--exclude-file good.txtpb",
                 {"good.txtpb", "line 1", "not the name of a host"}),
      submission("--chain 0", "--chain 0", {"--chain", "1 to 1000"}),
      submission("--ranks", "--ranks 2", {"--ranks"}),
      submission("--set without a value", "--set", {"--set"}),
      submission("--sweep without values",
                 "--sweep train.steps=", {"--sweep 'train.steps='", "path=value"}),
      submission("--sweep without a path", "--sweep =1,2", {"path=value"}),
      submission("--sweep with an empty value", "--sweep train.steps=1,,2", {"is empty"}),
      submission("--sweep with a value twice", "--sweep train.steps=1,2,1", {"'1'", "folder name"}),
      submission("--sweep of values with one name", "--sweep 'data.corpus=a/b,a b'", {"a_b"}),
      submission("--sweep of an unknown field", "--sweep train.stepz=1,2",
                 {"train.stepz", "did you mean"}, ExitCode::kConfig),
      submission("--sweep with a wrong value", "--sweep train.steps=8,-1", {"train.steps", "-1"},
                 ExitCode::kConfig),
      {.name = "submit --sweep in a run",
       .line = "submit good.txtpb --run run --site site.txtpb --sweep train.steps=8,9",
       .words = {"run", "choose another"},
       .spoil = [] { write_bytes("site.txtpb", ""); }},
      submission("--name that sbatch cannot hold", "--name hetjob", {"--job-name", "hetjob"}),
      {.name = "submit --name of two lines",
       .words = {"--job-name", "control character"},
       .spoil = [] { write_bytes("site.txtpb", ""); },
       .arguments = {"submit", "good.txtpb", "--run", "new", "--site", "site.txtpb", "--name",
                     "a\nb"}},
      {.name = "submit --run with a backslash",
       .words = {"backslash"},
       .spoil = [] { write_bytes("site.txtpb", ""); },
       .arguments = {"submit", "good.txtpb", "--run", "a\\b", "--site", "site.txtpb"}},
      {.name = "submit --run that is not UTF-8",
       .words = {"--run", "UTF-8"},
       .spoil = [] { write_bytes("site.txtpb", ""); },
       .arguments = {"submit", "good.txtpb", "--run", "a\xff", "--site", "site.txtpb"}},
      {.name = "submit where Slurm is not installed",
       .line = "submit good.txtpb --run new --site site.txtpb",
       .words = {"sbatch did not take", "PATH"},
       .spoil = [] { write_bytes("site.txtpb", ""); },
       .environment = {{"PATH", "/nowhere"}}},
  };
}

std::vector<BadInput> inputs() {
  return {
      {.name = "submit with a profile that is missing",
       .line = "submit good.txtpb --run new --site gone.txtpb",
       .code = ExitCode::kConfig,
       .words = {"gone.txtpb"}},
      submission("with an unknown field in the profile", "", {"site.txtpb:1:1", "'partition'"},
                 ExitCode::kConfig, "partiton: \"a\""),
      submission("for a GPU that the profile lacks", "--set device=cuda",
                 {"gpus_per_node is 0", "device is cuda"}, ExitCode::kConfig),
      submission("in an image that is missing", "", {"container", "'gone.sif'"}, ExitCode::kConfig,
                 "container: \"gone.sif\""),
      submission("of a configuration with a mistake", "--set train.steps=0", {"train.steps"},
                 ExitCode::kConfig),
      submission("without a corpus", "--set data.corpus=gone", {"gone"}, ExitCode::kData),
      submission("with ranks that mesh.data is not", "--set mesh.data=3", {"mesh: data 3"},
                 ExitCode::kConfig),
      {.name = "submit in a folder of other files",
       .line = "submit good.txtpb --run text --site site.txtpb",
       .words = {"text", "not empty"},
       .spoil = [] { write_bytes("site.txtpb", ""); }},
      {.name = "submit a run whose model differs",
       .line = "submit good.txtpb --run run --site site.txtpb --set model.heads=4",
       .code = ExitCode::kConfig,
       .words = {"model.heads"},
       .spoil = [] { write_bytes("site.txtpb", ""); }},
      usage("status of nothing", "status nowhere", {"'nowhere'", "is not a run"}),
      usage("status of a corpus", "status corpus", {"'corpus'", "is not a run"}),
      usage("tail of nothing", "tail nowhere", {"'nowhere'", "is not a run"}),
      usage("tail --lines negative", "tail run --lines -1", {"--lines"}),
      usage("cancel of nothing", "cancel nowhere", {"'nowhere'", "is not a run"}),
      usage("cancel without a run", "cancel", {"RUN", "required"}),
      {.name = "status with a damaged list of jobs",
       .line = "status run",
       .code = ExitCode::kStorage,
       .words = {"run.slurm/1/jobs.json", "damaged"},
       .spoil = [] { write_bytes("run.slurm/1/jobs.json", "{}"); }},
  };
}

}  // namespace

std::vector<BadInput> bad_submissions() {
  std::vector<BadInput> rows = flags();
  for (BadInput& row : inputs()) rows.push_back(std::move(row));
  return rows;
}

}  // namespace birkhoff
