// The table of formats. Adding one is one directory and one row in registry.cc.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lib/checkpoint/format.h"

namespace reshard {

// Rows, in the order in which a path is tried.
class FormatTable {
 public:
  explicit FormatTable(std::vector<const Format*> rows) : rows_(std::move(rows)) {}
  // A row of a program's own, before it opens or writes anything.
  void add(const Format& format) { rows_.push_back(&format); }

  auto begin() const { return rows_.begin(); }
  auto end() const { return rows_.end(); }

 private:
  std::vector<const Format*> rows_;
};
FormatTable& formats();

// The format of that name; a usage error that lists those that can be written.
Result<const Format*> find_format(std::string_view name);

// The format that recognises what is there; null where none does.
Result<const Format*> recognised_format(const PathSnapshot& place);

// Nothing where no format recognises the path, and it holds no checkpoint's parts (training_run.h).
Result<std::optional<OpenCheckpoint>> open_if_known(const std::string& path, const OpenOptions& options = {});

// An error where no format recognises the path; of a run's directory it says what to open.
Result<OpenCheckpoint> open_checkpoint(const std::string& path, const OpenOptions& options = {});

// Returns the files, relative to a directory, that may be removed with the checkpoint there: those that reshard's own
// manifest records (files_of_manifest), and nothing else. Where reshard did not write the checkpoint, the files that
// its reader uses, and config, tokenizer and manifest next to them (which need not exist). An error if it is no
// checkpoint.
Result<std::vector<std::string>> files_of_checkpoint(const std::string& directory);

}  // namespace reshard
