// The point sets of the input of `birkhoff prepare --points`: where they are, their shape, their
// classes.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/points/point_reader.h"
#include "data/prepare/records/record_input.h"

namespace birkhoff {

using PointOptions = RecordOptions;

inline constexpr RecordNouns kPointNouns = {
    .row = "point set",
    .a_row = "a file of point sets",
    .rows = "point sets",
    .doubt = "does `label` hold classes? --unlabeled makes no labels",
    .gives_class = "add the data set `label`"};

class PointInput final : public RecordInput {
 public:
  PointInput(const PointOptions& options, const Context& context);

  configs::CorpusManifest::Record record() const override;
  std::string describe() const override;
  std::unique_ptr<RowReader> reader() const override;

  // The name of a label of a set in a file of the input. Error(kData) if the file held no such
  // label before.
  std::string class_of(const std::string& path, std::int64_t label) const;
  // Error(kData) if a set of the file has not the bytes of the others.
  void require_size(const std::string& path, std::size_t bytes) const;

 protected:
  const FileRows* rows_in(const Document& file) override;
  // The names of the classes.
  std::string companion(const Document& file, const FileRows& held) const override;

 private:
  void find_in(const Document& file);
  void note_shape(const Document& file, const PointShape& shape);
  void note_labels(const Document& file, const std::vector<std::int64_t>& labels);
  void note_names(const Document& file, const std::vector<std::string>& names);
  const PointShape& shape() const;

  const PointOptions& options_;
  PointReader reader_;
  std::map<std::string, FileRows> files_;  // by path
  std::optional<PointShape> shape_;
  std::string first_, first_labeled_;  // the first file, and the first with labels
  std::vector<std::string> names_;     // of the labels 0, 1, ...; empty: there are none
  bool warned_of_test_ = false;
};

// Replaces each list of files (a path that ends in .txt) by the files whose names its lines end in,
// next to it. Error(kUsage): a list is empty, or such a file is missing.
std::vector<std::string> without_lists(const std::vector<std::string>& paths);

}  // namespace birkhoff
