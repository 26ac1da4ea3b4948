// Verification: is what lies on disk the model and the layout that was asked for, and are its bytes what they were?
// One call makes every audit of this directory that was asked for, in order, and says what it looked at. `reshard
// verify` is this call.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lib/audit/finding.h"
#include "lib/audit/values.h"
#include "lib/checkpoint/format.h"
#include "lib/engine/run.h"
#include "lib/model/model.h"

namespace reshard {

struct VerifyOptions {
  std::string path;
  ModelChoice model;
  std::string config;  // the config.json to hold it against; empty: the one beside it, if there is one

  std::optional<LayoutDescriptor> source_layout;  // how files of ranks join
  KeyChanges keys;                                // of the checkpoint that is verified
  Weights weights = Weights::kModel;              // likewise
  std::optional<LayoutDescriptor> layout;         // that it was saved in, with its mesh unless tensors are stored whole
  std::optional<Mesh> mesh;                       // where there is no layout: the mesh it was saved by
  std::string against;                            // another checkpoint of the same model; empty: none

  // Which data are read: all of them (checksums, digests), and looked at, or every stored copy too. Where nothing is
  // asked at all, `bytes`.
  bool bytes = false, values = false, replicas = false;
  bool exponents = false;  // with `values`: count elements by their exponents

  RunOptions run;              // its `progress` is not called
  std::string spool = "/tmp";  // as in Reader::locate
  // Called before so many bytes are read; what it returns is told how many of them are.
  std::function<std::function<void(Index bytes)>(Index bytes)> watch;

  bool asks_for_data() const { return bytes || values || replicas; }
  bool asks_for_nothing() const { return !asks_for_data() && config.empty() && !layout && !mesh && against.empty(); }
};

struct VerifiedTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  Digest digest;
  struct Other {  // the tensor of that name of the other checkpoint
    DType dtype = DType::kFloat32;
    Digest digest;
    bool equal = false;  // to this one's elements, in the dtype in which Comparison compares the two
  };
  std::optional<Other> against;
};

struct VerifyReport {
  const Format* format = nullptr;
  Model model;  // that the tensors were held against
  Index tensor_count = 0, tensor_bytes = 0;
  bool read_data = false;                                  // more than metadata and headers
  std::vector<std::pair<std::string, std::string>> facts;  // a label, which may be empty, and a clause
  std::vector<Finding> findings;                           // by severity
  std::vector<CheckRun> checks;                            // in the order of their making
  std::vector<VerifiedTensor> tensors;  // that were read; those both have where there was another checkpoint
  std::vector<ValueRow> values;         // where they were asked for

  void checked(std::string id, std::string title, Index looked_at);
  void skipped(std::string id, std::string title, std::string why);
  void fact(std::string label, std::string text);
  // The reference is good until the next finding.
  Finding& add(Severity severity, std::string id, std::string what);
  // A message of several lines: the first says what, the others why.
  Finding& add_message(std::string id, const std::string& message);
  void add(std::vector<Finding> more);
};

// An error where there is nothing to audit: the path does not open even as metadata, or what was asked makes no sense
// for it. What is wrong with the checkpoint is a finding.
Result<VerifyReport> verify(const Opener& open, const VerifyOptions& options);

}  // namespace reshard
