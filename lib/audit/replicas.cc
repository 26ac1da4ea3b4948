// SPDX-License-Identifier: Apache-2.0
#include "lib/audit/replicas.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "lib/base/text.h"
#include "lib/checkpoint/fragment_index.h"
#include "lib/transport/collectives.h"

namespace reshard {
namespace {

constexpr std::size_t kBatch = 4096;     // copies compared in one run, to limit memory
constexpr std::size_t kShownCopies = 8;  // of one tensor in its finding

// A further copy of a box.
struct Copy {
  std::size_t tensor = 0;   // in the catalog
  std::size_t replica = 0;  // index in its replicas
};

// How a copy differs from the first one.
struct Disagreement {
  Index count = 0;  // elements
  Index first = 0;  // index of the first differing element in the box, row-major
};

bool is_same_place(const Fragment& a, const Fragment& b) {
  return a.extent == b.extent && a.start == b.start && a.strides == b.strides;
}

// Returns the original fragment of `copy`.
Fragment original_of(const Tensor& tensor, const Fragment& copy) {
  Fragment out;
  FragmentIndex(tensor.fragments).overlapping(copy.box, [&](std::size_t i, const Box&) {
    if (tensor.fragments.box(i) == copy.box) out = tensor.fragments.get(i);
  });
  return out;
}

Index linear(const Box& in, const Dims& at) {
  Index n = 0;
  for (int d = 0; d < in.rank(); ++d) n = n * in.shape[d] + (at[d] - in.begin(d));
  return n;
}

// Returns the index of the n-th element of a box, row-major.
Dims place_of(const Box& box, Index n) {
  Dims at = box.origin;
  for (int d = box.rank() - 1; d >= 0; --d) {
    at[d] += n % box.shape[d];
    n /= box.shape[d];
  }
  return at;
}

Disagreement compare(const Box& part, const Box& copy, Index element_bytes, Bytes a, Bytes b) {
  Disagreement out;
  if (std::memcmp(a.data(), b.data(), a.size()) == 0) return out;
  const std::size_t width = element_bytes;
  for (std::size_t i = 0; i < a.size() / width; ++i) {
    if (std::memcmp(a.data() + i * width, b.data() + i * width, width) == 0) continue;
    if (out.count++ == 0) out.first = linear(copy, place_of(part, i));
  }
  return out;
}

class Replicas {
 public:
  Replicas(const Catalog& catalog, FilePool& files, const RunOptions& options)
      : catalog_(catalog), files_(files), options_(options), originals_(catalog, files) {}

  Result<ReplicaReport> compare_all() {
    collect();
    for (const std::vector<Copy>& generation : generations_) TRY(compare_generation(generation));
    report_.checksums_checked += originals_.checksums_checked();
    report_findings();
    return std::move(report_);
  }

 private:
  // Groups the copies into generations in which no box occurs twice, so that each generation is a catalog.
  void collect() {
    for (std::size_t t = 0; t < catalog_.tensors().size(); ++t) {
      const Tensor& tensor = catalog_.tensors()[t];
      if (tensor.replicas.empty()) continue;
      ++report_.tensors;
      const FragmentIndex index(tensor.fragments);
      std::map<Box, std::size_t> seen;
      for (std::size_t r = 0; r < tensor.replicas.size(); ++r) {
        const Fragment copy = tensor.replicas.get(r);
        if (copy.box.empty()) continue;
        bool shared = false;
        index.overlapping(copy.box, [&](std::size_t i, const Box&) {
          shared = shared || is_same_place(tensor.fragments.get(i), copy);
        });
        if (shared) {
          ++report_.shared;
          if (sharing_.empty() || sharing_.back() != tensor.name) sharing_.push_back(tensor.name);
          continue;
        }
        const std::size_t generation = seen[copy.box]++;
        if (generation == generations_.size()) generations_.emplace_back();
        generations_[generation].push_back({t, r});
        ++report_.copies;
        report_.bytes += volume(copy.box) * byte_size(tensor.dtype);
      }
    }
  }

  Status compare_generation(const std::vector<Copy>& copies) {
    Catalog further;  // the copies as a catalog
    further.root = catalog_.root;
    further.files = catalog_.files;
    std::vector<std::size_t> number;  // each copy's tensor in `further`
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const Tensor& from = catalog_.tensors()[copies[i].tensor];
      if (i == 0 || copies[i].tensor != copies[i - 1].tensor) {
        Tensor t;
        t.name = from.name;
        t.dtype = from.dtype;
        t.shape = from.shape;
        t.fragments = FragmentList(from.shape.rank());
        TRY(further.add(std::move(t)));
      }
      number.push_back(further.tensors().size() - 1);
      further.tensor(number.back()).fragments.add(from.replicas.get(copies[i].replica));
    }
    FileSource source(further, files_);
    for (std::size_t begin = 0; begin < copies.size(); begin += kBatch) {
      const std::size_t n = std::min(kBatch, copies.size() - begin);
      TRY(compare_batch(std::span(copies).subspan(begin, n), std::span(number).subspan(begin, n), source));
    }
    report_.checksums_checked += source.checksums_checked();
    return {};
  }

  Status compare_batch(std::span<const Copy> copies, std::span<const std::size_t> number, FileSource& source) {
    std::vector<PairRequest> requests;
    Index bytes = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const Tensor& t = catalog_.tensors()[copies[i].tensor];
      const Box box = t.replicas.box(copies[i].replica);
      bytes += volume(box) * byte_size(t.dtype);
      requests.push_back({copies[i].tensor, number[i], box});
    }
    RunOptions run = options_;
    if (run.progress) run.progress = [&](Index done) { options_.progress(done_ + done); };
    std::mutex mutex;
    std::vector<Disagreement> differences(copies.size());
    const auto add = [](Disagreement& sum, const Disagreement& d) {
      if (d.count == 0) return;
      sum.first = sum.count == 0 ? d.first : std::min(sum.first, d.first);
      sum.count += d.count;
    };
    TRY(visit_pairs(requests, originals_, source, run, [&](std::size_t i, const Box& part, Bytes a, Bytes b) {
      const Index element = byte_size(catalog_.tensors()[copies[i].tensor].dtype);
      const Disagreement d = compare(part, *requests[i].box, element, a, b);
      const std::lock_guard lock(mutex);
      add(differences[i], d);
    }));
    TRY(combine_values(options_.ranks, std::span(differences), add));
    done_ += bytes;
    for (std::size_t i = 0; i < copies.size(); ++i)
      if (differences[i].count > 0) disagreeing_[copies[i].tensor].emplace_back(copies[i], differences[i]);
    return {};
  }

  // Returns "__0_0.distcp@192".
  std::string place_text(const Fragment& f, Index element, Index element_bytes) const {
    const Dims at = place_of(f.box, element);
    Index n = 0;
    for (int d = 0; d < f.box.rank(); ++d) n += (at[d] - f.box.begin(d)) * f.strides[d];
    return printable(catalog_.files[f.extent.file].path) + "@" +
           std::to_string(f.extent.offset + f.start + n * element_bytes);
  }

  void report_findings() {
    for (const auto& [number, copies] : disagreeing_) {
      const Tensor& tensor = catalog_.tensors()[number];
      Finding f;
      f.id = "replicas-disagree";
      f.tensors = {tensor.name};
      const auto n = std::ssize(copies);
      f.what =
          n == 1 ? "two copies of one box differ" : with_commas(n) + " copies differ from the first copy of their box";
      for (std::size_t i = 0; i < std::min(kShownCopies, copies.size()); ++i) {
        const auto& [copy, difference] = copies[i];
        const Fragment further = tensor.replicas.get(copy.replica), first = original_of(tensor, further);
        const Index element = byte_size(tensor.dtype);
        f.why.push_back(to_string(further.box) + ": " + with_commas(difference.count) + " of " +
                        count_of(volume(further.box), "element") +
                        (difference.count == 1 ? " differs, at " : " differ, the first at ") +
                        to_string(place_of(further.box, difference.first)) + ", at " +
                        place_text(first, difference.first, element) + " and " +
                        place_text(further, difference.first, element));
      }
      if (copies.size() > kShownCopies)
        f.why.push_back("and " + with_commas(copies.size() - kShownCopies) + " copies more");
      f.lost = "One of the copies is wrong; the files do not tell which.";
      f.advice =
          "reshard and torch read the first copy. Compare both with the previous checkpoint. Ranks of a replica "
          "group that drift apart have missed an all-reduce or run on faulty hardware.";
      report_.findings.push_back(std::move(f));
    }
    if (sharing_.empty()) return;
    Finding f;
    f.severity = Severity::kWarning;
    f.id = "replicas-shared";
    f.tensors = sharing_;
    f.what = with_commas(report_.shared) + (report_.shared == 1 ? " further copy has" : " further copies have") +
             " the same bytes in the file as the first one";
    f.why = {"the metadata lists the box twice, at the same offset of the same file"};
    f.advice = "There is only one copy, although the metadata lists more.";
    report_.findings.push_back(std::move(f));
  }

  const Catalog& catalog_;
  FilePool& files_;
  const RunOptions& options_;
  FileSource originals_;
  ReplicaReport report_;
  Index done_ = 0;  // bytes
  std::vector<std::vector<Copy>> generations_;
  std::map<std::size_t, std::vector<std::pair<Copy, Disagreement>>> disagreeing_;  // by tensor
  std::vector<std::string> sharing_;                                               // names
};

}  // namespace

Result<ReplicaReport> compare_replicas(const Catalog& catalog, FilePool& files, const RunOptions& options) {
  return Replicas(catalog, files, options).compare_all();
}

}  // namespace reshard
