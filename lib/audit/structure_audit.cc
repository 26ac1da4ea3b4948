// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <set>

#include "lib/audit/metadata_audits.h"
#include "lib/base/names.h"
#include "lib/base/text.h"
#include "lib/checkpoint/format.h"
#include "lib/checkpoint/key_paths.h"
#include "lib/model/parts.h"

namespace reshard {
namespace {

constexpr std::size_t kShownFiles = 5;
constexpr std::size_t kMaxHeaders = 100'000;  // takes about a second; with more pieces the headers are not checked

std::string some(std::vector<std::string> names) {
  for (std::string& name : names) name = printable(name);
  return some_of(names, kShownFiles);
}

// Returns the names of the tensors that have a piece in one of these files.
std::vector<std::string> tensors_in(const Catalog& catalog, const std::set<std::uint32_t>& files) {
  std::vector<std::string> names;
  for (const Tensor& t : catalog.tensors())
    for (std::size_t i = 0; i < t.fragments.size(); ++i)
      if (files.contains(t.fragments.extent(i).file)) {
        names.push_back(t.name);
        break;
      }
  return names;
}

void check_covers(const Catalog& catalog, FindingList& findings) {
  std::vector<std::string> first_messages, names;
  for (const auto& [tensor, error] : tensor_faults(catalog, false)) {
    names.push_back(catalog.tensors()[tensor].name);
    if (first_messages.size() < kShownFiles) first_messages.push_back(error.message());
  }
  if (names.empty()) return;
  Finding& f = findings.add(Severity::kError, "cover");
  f.what = "the stored pieces do not cover " + std::string(names.size() == 1 ? "it" : "them") + " exactly once";
  f.advice =
      "A rank did not write, or the metadata belongs to another save. Look for the missing pieces in an earlier copy.";
  if (names.size() < catalog.tensors().size())
    f.advice += " Add --allow cover to convert to leave such tensors out and write the others.";
  f.tensors = std::move(names);
  f.why = std::move(first_messages);
}

// `missing` has the names of the missing files.
void report_missing_files(const Catalog& catalog, const std::vector<std::string>& missing, FindingList& findings) {
  const std::vector<Index> needs = bytes_needed(catalog);
  std::set<std::uint32_t> gone;
  for (std::uint32_t f = 0; f < catalog.files.size(); ++f)
    if (catalog.files[f].size < 0) gone.insert(f);
  Finding& finding = findings.add(Severity::kError, "file-missing");
  finding.what = count_of(std::ssize(missing), "data file") + " of " + with_commas(std::ssize(catalog.files)) +
                 (missing.size() == 1 ? " is" : " are") + " missing: " + some(missing);
  Index bytes = 0;
  finding.tensors = tensors_in(catalog, gone);
  for (const std::uint32_t f : gone) bytes += needs[f];
  finding.lost =
      "At least " + human_bytes(bytes) + " of " + count_of(std::ssize(finding.tensors), "tensor") + " is missing.";
  finding.advice =
      "Copy the files from where the job wrote them. If they never existed, the save was interrupted or "
      "ranks did not write.";
}

void report_short_files(const Catalog& catalog, FindingList& findings) {
  const std::vector<Index> needs = bytes_needed(catalog);
  std::set<std::uint32_t> cut;
  std::vector<std::string> lines;
  for (std::uint32_t f = 0; f < catalog.files.size(); ++f) {
    const CatalogFile& file = catalog.files[f];
    if (file.size < 0 || file.size >= needs[f]) continue;
    cut.insert(f);
    if (lines.size() < kShownFiles)
      lines.push_back(printable(file.path) + ": expected at least " + count_of(needs[f], "byte") + ", got " +
                      with_commas(file.size));
  }
  if (cut.empty()) return;
  Finding& f = findings.add(Severity::kError, "file-short");
  f.what = count_of(std::ssize(cut), "data file") + (cut.size() == 1 ? " is" : " are") +
           " truncated: the disk was full, the copy or the save was interrupted, or it belongs to another save";
  f.why = std::move(lines);
  f.tensors = tensors_in(catalog, cut);
}

// Reports gaps between items, which writers store contiguously, so something recorded there was lost. Tensors that are
// located from the start only have payload extents, so the bytes around them are unknown.
void check_unclaimed(const Catalog& catalog, FindingList& findings) {
  if (catalog.shares_extents || catalog.has_other_bytes || (catalog.tensors().empty() && catalog.blobs.empty())) return;
  std::vector<std::vector<std::pair<Index, Index>>> claimed(catalog.files.size());
  const auto claim = [&](const Extent& e) { claimed[e.file].emplace_back(e.offset, e.offset + e.length); };
  for (const Tensor& t : catalog.tensors()) {
    if (t.located) return;
    for (const FragmentList* list : {&t.fragments, &t.replicas})
      for (std::size_t i = 0; i < list->size(); ++i) claim(list->extent(i));
  }
  for (const Blob& b : catalog.blobs) {
    claim(b.extent);
    // An object without bytes of its own is a part of the file, such as a member of a JSON object.
    if (b.extent.length == 0) claim({b.extent.file, 0, catalog.files[b.extent.file].size});
    for (const Extent& copy : b.copies) claim(copy);
  }
  Index bytes = 0;
  std::vector<std::string> lines;
  for (std::size_t f = 0; f < claimed.size(); ++f) {
    std::sort(claimed[f].begin(), claimed[f].end());
    claimed[f].emplace_back(catalog.files[f].size, catalog.files[f].size);
    Index end = 0;
    for (const auto& [begin, next] : claimed[f]) {
      if (begin > end) {
        bytes += begin - end;
        if (lines.size() < kShownFiles)
          lines.push_back(printable(catalog.files[f].path) + ": " + count_of(begin - end, "byte") + " at " +
                          with_commas(end));
      }
      end = std::max(end, next);
    }
  }
  if (bytes == 0) return;
  Finding& f = findings.add(Severity::kWarning, "unclaimed-bytes");
  f.what = human_bytes(bytes) + " of the data files belong to no tensor or object";
  f.why = std::move(lines);
  f.advice = "Writers leave no gaps: the metadata lost an entry, or belongs to another save than the files.";
}

// Reports names that differ from the path in the nested state_dict, joined by dots.
void check_key_paths(const Catalog& catalog, FindingList& findings) {
  std::vector<std::string> wrong = names_off_paths(catalog);
  if (wrong.empty()) return;
  Finding& f = findings.add(Severity::kWarning, "key-path");
  f.what = "the path in the nested state_dict does not match the name";
  f.tensors = std::move(wrong);
  f.advice = "Loaders that rebuild the nested state_dict would put it elsewhere: the metadata is damaged.";
}

// Returns a finding of the tensors of these names, or nothing if there are none.
std::optional<Finding> header_finding(std::vector<std::string> names, std::vector<std::string> messages,
                                      bool is_of_system) {
  if (names.empty()) return std::nullopt;
  Finding f;
  f.id = "header";
  f.what = is_of_system ? "cannot be checked"
                        : "the stored data does not match the metadata " +
                              std::string(names.size() == 1 ? "of this tensor" : "of these tensors");
  f.tensors = std::move(names);
  f.why = std::move(messages);
  f.advice =
      is_of_system
          ? "The system returned an error; the data itself may be fine. Compressed items are decoded into TMPDIR."
          : "A file was overwritten by another save, two files were exchanged, or bytes are damaged.";
  return f;
}

// Checks the headers around the pieces of the tensors that can be read. Returns false if there are too many.
bool check_headers(Reader& reader, int threads, const std::string& spool, std::set<std::size_t>& unreadable,
                   FindingList& findings) {
  const Catalog& catalog = reader.catalog();
  std::size_t pieces = 0;
  for (const Tensor& t : catalog.tensors()) pieces += t.fragments.size();
  if (pieces > kMaxHeaders) return false;
  for (Finding& f : locate_each(reader, readable_tensors(catalog, unreadable), threads, spool, unreadable))
    findings.add(std::move(f));
  std::vector<std::string> names, messages;
  for (const auto& [tensor, error] : tensor_faults(catalog, true)) {
    if (!unreadable.insert(tensor).second) continue;
    names.push_back(catalog.tensors()[tensor].name);
    if (messages.size() < kShownFiles) messages.push_back(error.message());
  }
  if (auto f = header_finding(std::move(names), std::move(messages), false)) findings.add(*std::move(f));
  return true;
}

void report_unread_files(const Catalog& catalog, FindingList& findings) {
  const std::vector<UnreadFile>& files = catalog.unread_files;
  if (files.empty()) return;
  Finding& f = findings.add(Severity::kError, "file-unreadable");
  f.what =
      count_of(std::ssize(files), "data file") +
      (files.size() == 1 ? " is missing or damaged, or lacks tensors" : " are missing or damaged, or lack tensors") +
      "; only the rest was checked";
  for (const UnreadFile& file : files) f.why.push_back(file.why.message());
  f.tensors = tensors_without_data(catalog);
  const std::string lost = files_to_restore(files);
  f.advice = lost.empty() ? "Correct the index, or save the model again."
                          : "Restore " + lost + " from another copy of the checkpoint.";
}

void report_objects_alone(const Catalog& catalog, FindingList& findings) {
  if (!catalog.tensors().empty() || catalog.blobs.empty()) return;
  std::vector<std::string> names;
  for (const Blob& blob : catalog.blobs) names.push_back("'" + printable(blob.name) + "'");
  Finding& f = findings.add(Severity::kNote, "objects-alone");
  f.what = "there are no tensors, only " + count_of(std::ssize(names), "object") + ": " + some_of(names, 3);
  f.advice =
      "A model that is pickled as one object (flatten_state_dict=False) is not read: save it with "
      "flatten_state_dict=True.";
}

void report_leftovers(const Catalog& catalog, FindingList& findings) {
  for (const std::string& text : catalog.warnings) findings.add(Severity::kWarning, "reader").what = text;
  for (const std::string& text : catalog.notes) findings.add(Severity::kNote, "reader").what = text;
  if (std::string doubt = doubt_about_model(catalog); !doubt.empty())
    findings.add(Severity::kNote, "model-average").what = std::move(doubt);
  if (catalog.stale_files.empty()) return;
  Finding& f = findings.add(Severity::kWarning, "stale-files");
  f.what = count_of(std::ssize(catalog.stale_files), "file") + " in the directory " +
           (catalog.stale_files.size() == 1 ? "belongs" : "belong") +
           " to no tensor or object: " + some(catalog.stale_files);
  f.why.emplace_back("left by an earlier save with more ranks or files, or by an interrupted save");
  f.advice =
      "A loader that globs files instead of reading the index would mix them in. Remove them once the "
      "checkpoint is known to be good.";
}

}  // namespace

std::vector<std::size_t> readable_tensors(const Catalog& catalog, const std::set<std::size_t>& unreadable) {
  std::vector<std::size_t> out;
  for (std::size_t i = 0; i < catalog.tensors().size(); ++i)
    if (!unreadable.contains(i)) out.push_back(i);
  return out;
}

std::vector<Finding> locate_each(Reader& reader, const std::vector<std::size_t>& tensors, int threads,
                                 const std::string& spool, std::set<std::size_t>& unreadable) {
  if (reader.locate(tensors, threads, spool)) return {};
  std::vector<std::string> names, messages, unread, reasons;
  bool is_of_system = true;
  for (const std::size_t i : tensors) {
    const Status located = reader.locate({i}, 1, spool);
    if (located) continue;
    unreadable.insert(i);
    const bool is_unsupported = located.error().code() == ErrorCode::kUnsupported;
    if (!is_unsupported) is_of_system = is_of_system && located.error().code() == ErrorCode::kIo;
    (is_unsupported ? unread : names).push_back(reader.catalog().tensors()[i].name);
    auto& why = is_unsupported ? reasons : messages;
    if (why.size() < kShownFiles) why.push_back(located.error().message());
  }
  std::vector<Finding> out;
  if (auto f = header_finding(std::move(names), std::move(messages), is_of_system)) out.push_back(*std::move(f));
  if (unread.empty()) return out;
  Finding& f = out.emplace_back();
  f.severity = Severity::kWarning;
  f.id = "unread";
  f.what = "the data " + std::string(unread.size() == 1 ? "of this tensor" : "of these tensors") +
           " is in a form that reshard does not read";
  f.tensors = std::move(unread);
  f.why = std::move(reasons);
  f.advice = "It was not checked. Commands that need it refuse it; --part and --exclude leave it out.";
  return out;
}

StructureAudit audit_structure(Reader& reader, int threads, const std::string& spool) {
  const Catalog& catalog = reader.catalog();
  StructureAudit out;
  FindingList findings;
  report_unread_files(catalog, findings);
  check_covers(catalog, findings);
  std::vector<std::string> missing;
  for (const CatalogFile& file : catalog.files)
    if (file.size < 0) missing.push_back(file.path);
  out.metadata_only = !missing.empty() && missing.size() == catalog.files.size();
  if (!out.metadata_only) {
    if (!missing.empty()) report_missing_files(catalog, missing, findings);
    report_short_files(catalog, findings);
  }
  const Status shared = check_extents_disjoint(catalog, SharedExtents::kRefused);
  if (!shared) {
    Finding& f = findings.add(Severity::kError, "shared-bytes");
    f.what = shared.error().message();
    f.advice = "The two pieces cannot both be right: the metadata is damaged, or the writer has a bug.";
  }
  check_unclaimed(catalog, findings);
  check_key_paths(catalog, findings);
  if (out.metadata_only || !shared) {
    for (std::size_t i = 0; i < catalog.tensors().size(); ++i) out.unreadable.insert(i);
  } else {
    if (findings.has_errors())
      for (const TensorFault& fault : tensor_faults(catalog, true)) out.unreadable.insert(fault.tensor);
    out.headers_read = check_headers(reader, threads, spool, out.unreadable, findings);
  }
  report_objects_alone(catalog, findings);
  report_leftovers(catalog, findings);
  out.is_readable = !findings.has_errors();
  out.findings = findings.take();
  return out;
}

}  // namespace reshard
