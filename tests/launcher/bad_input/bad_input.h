// The table of malformed inputs. Each row spoils one thing, runs one command line, and lists the
// texts that the user must see.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "tests/launcher/child.h"

namespace birkhoff {

// Where a row's command line runs.
enum class Where {
  kHere,            // in the test's own process, through run_app()
  kHereAndProcess,  // in the test's own process, and as a real process
  kProcess,         // only as a real process: it starts MPI, or its environment cannot be made here
};

struct BadInput {
  std::string name;       // what is wrong; unique
  std::string line = {};  // command line of `birkhoff`, for split_line()
  ExitCode code = ExitCode::kUsage;
  std::vector<std::string> words = {};  // parts of the message, in any order
  // Spoils the good input in the working directory before the run.
  std::function<void()> spoil = {};
  Where where = Where::kHere;
  Environment environment = {};
  FileFaultHook fault = {};                      // system calls that fail
  std::string input = "/dev/null", output = {};  // files for standard input and output
  std::string shell = {};  // shell commands to run before the process starts, such as "ulimit -f 1"
  std::vector<std::string> arguments = {};  // instead of `line`, if that cannot express them
};

// The same row with another place to run.
inline BadInput as_process_too(BadInput row) {
  row.where = Where::kHereAndProcess;
  return row;
}
inline BadInput as_process(BadInput row) {
  row.where = Where::kProcess;
  return row;
}

// Good input, by relative path (good_input.h makes it):
//   good.txtpb    a tiny model, 4 steps, on corpus/
//   configs/      other configuration texts, where a row writes them
//   text/one.txt, text/two.txt
//   corpus/       characters: train in several shards of equal size, valid, test
//   bytes/, words/, pieces/   the same text with other tokenizers; bytes has no test split
//   other/        other text of the same characters
//   tables/train.tsv, tables/test.tsv   columns text and label, of 40 and 10 rows
//   labels/       made of them: train in several shards, valid, test
//   run/          trained with good.txtpb: checkpoints/step-00000002 and step-00000004
std::vector<BadInput> bad_flags();
std::vector<BadInput> bad_texts();   // input of prepare
std::vector<BadInput> bad_tables();  // input of prepare, and corpora made of tables
std::vector<BadInput> bad_pairs();   // input of prepare
std::vector<BadInput> bad_images();  // input of prepare
std::vector<BadInput> bad_points();  // input of prepare
std::vector<BadInput> bad_config_texts();
std::vector<BadInput> bad_config_values();
std::vector<BadInput> bad_corpora();
std::vector<BadInput> bad_manifests();  // of corpora
std::vector<BadInput> bad_checkpoints();
std::vector<BadInput> bad_runs();         // resumed by train
std::vector<BadInput> bad_looks();        // at runs: inspect, runs, compare
std::vector<BadInput> bad_decoding();     // generate, score, bleu, average
std::vector<BadInput> bad_submissions();  // to Slurm
std::vector<BadInput> bad_environments();
std::vector<BadInput> bad_files();  // pipes, sockets, devices and folders in place of files

}  // namespace birkhoff
