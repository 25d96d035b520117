// The rows of the input of `birkhoff prepare` that become a record, for instance images: in which
// files they are, their classes, and how they are read. Derived classes know the formats.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/files/checksum.h"
#include "configs/schema/corpus_manifest.pb.h"
#include "data/corpus/record_shards.h"
#include "data/corpus/shard_format.h"
#include "data/prepare/classes.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/out_folder.h"
#include "data/prepare/prepare_progress.h"

namespace birkhoff {

// Options of all kinds of records.
struct RecordOptions {
  bool labels = true;         // take those of the input, if it has any
  bool skip_damaged = false;  // and count them; else the first one ends the command
  std::int64_t shard_bytes = shard_format::kRecordShardBytes;  // at most, or a single row
};

// The nouns of messages.
struct RecordNouns {
  const char *row, *a_row, *rows;  // "image", "an image", "images"
  const char* doubt;               // advice if there are too many classes, or too few
  const char* gives_class;         // advice for a row without one
};

struct WantedRow {
  std::string path;
  std::int64_t number = -1;  // in a file of many; -1: the file is the row
};

// A row of the input, valid during the visit.
struct InputRow {
  const Document& document;  // bytes: 1; label: the class that its folder names
  WantedRow wanted;
  std::int64_t bytes;  // its share of the file
};

struct ReadRow {
  std::string damage;        // not empty: why there is no row, beginning with the path
  std::vector<char> values;  // of the record
  std::string label;         // in its file; empty: it has none
};

// Reads rows in a child process, because the libraries that parse files may crash on damaged ones.
class RowReader {
 public:
  virtual ~RowReader() = default;
  // Calls take(i, row) for each, in order. The child holds the last file open: ask for rows of a
  // file in the order of their numbers. Error(kUsage): a row does not fit the record. Errors of the
  // file system (also if a file is missing) and of the machine are thrown.
  virtual void read(const std::vector<WantedRow>& wanted,
                    const std::function<void(std::size_t i, const ReadRow& row)>& take) = 0;
};

class RecordInput {
 public:
  // What outlives the input.
  struct Context {
    const std::vector<InputPath>& inputs;
    const OutFolder& folder;
    Classes& classes;
    ProgressReports& progress;
  };

  RecordInput(const RecordOptions& options, const RecordNouns& nouns, const Context& context);
  virtual ~RecordInput() = default;

  // Finds the files that hold rows, the form of these and their classes. Call it first.
  // Error(kData): a file cannot be read, unless such files are skipped. Error(kUsage): files differ
  // in form, or only some rows have classes.
  void find();
  // Visits the rows in order. The scan counts rows; its hash is that of files.
  InputScan for_each(const std::function<void(const InputRow&)>& visit);

  // Of the rows that find() has found.
  const InputScan& scan() const { return scan_; }
  std::int64_t bytes() const { return bytes_; }
  bool has_classes() const { return !labeled_.empty(); }
  const Damages& damages() const { return damages_; }  // of files that cannot be opened
  const std::vector<std::string>& notes() const { return notes_; }
  const RecordNouns& nouns() const { return nouns_; }

  // The entry of the record without rows and shards, and its form in words, for the source of the
  // corpus. Error(kData) if no row can be read.
  virtual configs::CorpusManifest::Record record() const = 0;
  virtual std::string describe() const = 0;
  // A reader of its own for each split, whose rows are in the order of their files.
  virtual std::unique_ptr<RowReader> reader() const = 0;

  // Counts what cannot be read, or throws it as Error(kData).
  void damaged(const std::string& reason, Damages& damages) const;

 protected:
  // What a file holds.
  struct FileRows {
    std::int64_t rows = 0;
    bool is_row = false;  // the file is a row, and its folder names its class
  };

  // What the file holds; null: no rows, or none that can be read. With is_finding() it calls
  // note_file() and add_class() for what it finds, and else depends only on what it has found.
  virtual const FileRows* rows_in(const Document& file) = 0;
  // A file that need not be part of the input, and belongs to `file`; empty: none.
  virtual std::string companion(const Document& /*file*/, const FileRows& /*held*/) const {
    return "";
  }

  bool is_finding() const { return is_finding_; }
  bool is_given(const Document& file) const { return given_.contains(file.path); }
  // Notes that the name of a file is not that of a row's.
  void leave_out(const Document& file);
  // Calls read(), whose Error(kData) says why the file cannot be read. Returns false then.
  bool reads_file(const std::function<void()>& read);
  // Takes a file with rows into account, and whether these have classes.
  void note_file(const Document& file, bool has_class);
  void add_class(const Document& file, const std::string& label);
  void add_note(std::string note) { notes_.push_back(std::move(note)); }
  Damages& file_damages() { return damages_; }
  const Context& context() const { return context_; }

 private:
  void add_companion(const Document& file, const FileRows& held, Xxh3Hasher& hasher) const;
  void visit_rows(const Document& file, const FileRows& held, DocumentCounts& counts,
                  const std::function<void(const InputRow&)>& visit) const;

  const RecordOptions& options_;
  const RecordNouns nouns_;
  const Context context_;
  std::set<std::string> given_;

  bool is_finding_ = false;
  std::string labeled_, unlabeled_;  // the first file with and without a class
  std::int64_t bytes_ = 0, num_left_out_ = 0;
  std::string left_out_;  // the first one
  std::vector<std::string> notes_;
  Damages damages_;
  InputScan scan_;
};

// The folder of a file, relative to the given one; empty if that is it.
std::string folder_of(const Document& file);

// The text with a to z in place of A to Z.
std::string lower_case(std::string text);
// Whether the path ends in one of these suffixes, which are lower case, in any case.
bool has_suffix(const std::string& path, const std::vector<std::string>& suffixes);

}  // namespace birkhoff
