// Site profiles: the examples in the tree, the location and the words of each error, and times.
#include <gmock/gmock.h>
#include <unistd.h>

#include "configs/loader/site_io.h"
#include "helpers.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class SiteFile {
 public:
  explicit SiteFile(const std::string& text) { std::ofstream(path_) << text; }
  ~SiteFile() { fs::remove(path_); }
  SiteFile(const SiteFile&) = delete;
  SiteFile& operator=(const SiteFile&) = delete;
  configs::Site load() const { return load_site(path_); }

 private:
  fs::path path_ = fs::path(testing::TempDir()) / ("site_" + std::to_string(getpid()) + ".txtpb");
};

TEST(Site, TheExamplesLoad) {
  const fs::path folder = fs::path(BIRKHOFF_SOURCE_DIR) / "configs/sites";
  int num_files = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path());
    EXPECT_GT(load_site(entry.path()).ranks_per_node(), 0);
    num_files += 1;
  }
  EXPECT_EQ(num_files, 3);
}

TEST(Site, RanksAreThoseOfTheGpusUnlessGiven) {
  EXPECT_EQ(SiteFile("").load().ranks_per_node(), 1);
  EXPECT_EQ(SiteFile("gpus_per_node: 8").load().ranks_per_node(), 8);
  EXPECT_EQ(SiteFile("gpus_per_node: 8 ranks_per_node: 4").load().ranks_per_node(), 4);
}

struct Refusal {
  const char* text;
  const char* place;  // line:column: field
  const char* words;
};

const Refusal kRefusals[] = {
    {"partiton: \"a\"", "1:1: partiton", "did you mean 'partition'?"},
    {"\npartition: 5", "2:12: partition", "got '5'"},
    {"partition: \"a\" partition: \"b\"", "1:16: partition", "is given twice"},
    {"partition: \"a\\nb\"", "1:1: partition", "control character"},
    {"account: \"\\377\"", "1:1: account", "is not UTF-8"},
    {"gpus_per_node: -1", "1:1: gpus_per_node", "must be in [0, 64], is -1"},
    {"cpus_per_rank: 1.5", "1:16: cpus_per_rank", "expected an integer"},
    {"signal_seconds: 65536", "1:1: signal_seconds", "must be in [0, 65535]"},
    {"requeue: maybe", "1:10: requeue", "expected true or false"},
    {"launcher: slurm", "1:11: launcher", "allowed: srun, mpirun"},
    {"time_limit: \"a day\"", "1:1: time_limit", "'a day' is not a time"},
    {"time_limit: \"0\"", "1:1: time_limit", "is not a time"},
    {"modules: \"gcc\" modules: \"-l\"", "1:16: modules.1", "is not the name of a module"},
    {"modules: \"\"", "1:1: modules.0", "is not the name of a module"},
    {"modules: \"a\\nrm\"", "1:1: modules.0", "control character"},
    {"environment: \"A B=c\"", "1:1: environment.0", "must be NAME=value"},
    {"environment: \"=c\"", "1:1: environment.0", "must be NAME=value"},
    {"environment: \"A$(x)=c\"", "1:1: environment.0", "must be NAME=value"},
    {"sbatch: \"mem=0\"", "1:1: sbatch.0", "must be an option of sbatch"},
    {"sbatch: \"--mem=0\\nrm -r x\"", "1:1: sbatch.0", "control character"},
    {"exclude: \"\"", "1:1: exclude.0", "is empty"},
    {"gpus_per_node: 2 ranks_per_node: 3", "1:18: ranks_per_node", "3 ranks do not fit 2 GPUs"},
    {"ranks_per_node: 3 cpus_per_node: 2", "1:1: ranks_per_node", "need 3 cores"},
    {"ranks_per_node: 2\ncpus_per_rank: 4\ncpus_per_node: 7", "2:1: cpus_per_rank",
     "2 ranks of a node need 8 cores, and cpus_per_node is 7"},
    {"include: \"x\"", "1:1: include", "unknown field 'include'"},
};

TEST(Site, RefusalsNameThePlace) {
  for (const Refusal& refusal : kRefusals) {
    SCOPED_TRACE(refusal.text);
    const SiteFile file(refusal.text);
    const std::string what = config_error([&] { file.load(); });
    EXPECT_THAT(what, HasSubstr(std::string(".txtpb:") + refusal.place + ": "));
    EXPECT_THAT(what, HasSubstr(refusal.words));
  }
}

TEST(Site, AFileThatCannotBeReadIsNamed) {
  EXPECT_THAT(config_error([] { load_site("missing.txtpb"); }), HasSubstr("missing.txtpb"));
  EXPECT_THAT(config_error([] { load_site("/tmp"); }), HasSubstr("/tmp"));
}

TEST(Site, TimesAreThoseOfSbatch) {
  const auto seconds_of = [](const std::string& text) {
    const auto time = slurm_time(text);
    return time ? time->count() : -1;
  };
  EXPECT_EQ(seconds_of("90"), 90 * 60);
  EXPECT_EQ(seconds_of("90:30"), 90 * 60 + 30);
  EXPECT_EQ(seconds_of("2:00:05"), 7205);
  EXPECT_EQ(seconds_of("1-12"), 36 * 3600);
  EXPECT_EQ(seconds_of("1-12:30"), 36 * 3600 + 1800);
  EXPECT_EQ(seconds_of("1-00:00:01"), 86401);
  for (const char* text : {"", "0", "0:00", "-1", "1-", "1:2:3:4", "1-1:1:1:1", " 5", "5 ", "1h",
                           "UNLIMITED", "1.5", "9999-00:00:00", "99999999999"}) {
    EXPECT_EQ(seconds_of(text), -1) << text;
  }
}

}  // namespace
}  // namespace birkhoff
