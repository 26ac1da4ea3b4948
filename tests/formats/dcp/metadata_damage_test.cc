// Tests DCP metadata in which a byte was changed or the end is missing: the result is an error, is harmless, or is
// another name, which nothing can contradict.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include "formats/dcp/dcp.h"
#include "formats/open.h"
#include "lib/checkpoint/catalog.h"
#include "tests/support/checkpoints.h"
#include "tests/support/soak.h"
#include "tests/support/temp_dir.h"

namespace reshard::metadata_damage_test {
namespace {

namespace fs = std::filesystem;

// The content of a located catalog, separated into facts that no reader can check and the others.
struct Seen {
  // Facts that are recorded only once: names of tensors and objects, their paths in the state_dict, shapes of empty
  // tensors.
  std::string names;
  std::string contents;  // everything else
};
Seen seen(const Catalog& catalog) {
  Seen out;
  const auto number = [&](Index n) { out.contents += std::to_string(n) + " "; };
  const auto extent = [&](const Extent& e) {
    out.contents += catalog.files[e.file].path + " ";
    number(e.offset);
    number(e.length);
  };
  const auto path = [&](const KeyPath& keys) {
    for (const auto& key : keys)
      out.names += (key.index() == 0 ? "'" + std::get<0>(key) + "'" : std::to_string(std::get<1>(key))) + ".";
    out.names += "\n";
  };
  // Sorted by their positions in the files, because names may have changed.
  std::map<std::string, Seen> sorted;
  for (const Tensor& t : catalog.tensors()) {
    out = {};
    out.names = t.name + " ";
    path(t.path);
    out.contents = std::string(info(t.dtype).torch_name);
    // A tensor without elements has no data in the files that could contradict its shape.
    (t.elements() == 0 ? out.names : out.contents) += to_string(t.shape);
    std::set<std::string> fragments;
    for (const FragmentList* list : {&t.fragments, &t.replicas})
      for (std::size_t i = 0; i < list->size(); ++i) {
        const Fragment f = list->get(i);
        if (f.box.empty()) continue;
        const std::string before = std::exchange(out.contents, "");
        out.contents = to_string(f.box) + to_string(f.strides) + (f.crc ? std::to_string(*f.crc) : "-");
        extent(f.extent);
        number(f.start);
        fragments.insert(out.contents);
        out.contents = before;
      }
    for (const std::string& f : fragments) out.contents += f + "\n";
    sorted[out.contents + out.names] = out;
  }
  for (const Blob& b : catalog.blobs) {
    out = {};
    out.names = b.name + " ";
    path(b.path);
    extent(b.extent);
    sorted[out.contents + out.names] = out;
  }
  Seen all;
  for (const auto& [key, s] : sorted) {
    all.names += s.names;
    all.contents += s.contents + "\n";
  }
  return all;
}

// Opens a checkpoint and reads everything but the payloads of its tensors.
Result<Seen> open_whole(const std::string& path, const std::string& spool) {
  const auto reader = TRY(open_with(kDcpFormat, path));
  std::vector<std::size_t> all(reader->catalog().tensors().size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  TRY(reader->locate(all, 1, spool));
  TRY(validate(reader->catalog()));
  for (const Blob& blob : reader->catalog().blobs) TRY(reader->blob_bytes(blob));
  return seen(reader->catalog());
}

TEST(Metadata, EveryChangedByteIsAnErrorOrHarmlessOrAName) {
  for (const std::string name : {"ck1", "ck2"}) {
    const TempDir dir;
    fs::copy(std::string(RESHARD_TEST_DATA) + "/dcp_small/" + name, dir / "ck", fs::copy_options::recursive);
    const std::string path = dir / "ck/.metadata", healthy = read_file(path);
    const auto expected = open_whole(dir / "ck", dir.path());
    ASSERT_TRUE(expected) << expected.error().message();
    int errors = 0, harmless = 0, names = 0;
    const auto check = [&](const std::string& bytes, const std::string& what) {
      fs::remove(path);  // overwriting a file costs a flush on some file systems
      write_file(path, bytes);
      const auto got = open_whole(dir / "ck", dir.path());
      if (!got) {
        ++errors;
        const ErrorCode code = got.error().code();
        EXPECT_TRUE(code == ErrorCode::kCorrupt || code == ErrorCode::kUnsupported || code == ErrorCode::kIo)
            << what << ": " << static_cast<int>(code) << " " << got.error().message();
        EXPECT_THAT(got.error().message(), testing::HasSubstr(dir / "ck")) << what;
        return;
      }
      EXPECT_TRUE(got->contents == expected->contents) << name << " " << what << "\n" << got->contents;
      ++(got->names == expected->names ? harmless : names);
    };
    const auto step = static_cast<std::size_t>(every_nth(25));
    for (std::size_t i = 0; i < healthy.size(); i += step) {
      for (const int flip : {0x01, 0x80, 0xff}) {
        std::string bytes = healthy;
        bytes[i] = static_cast<char>(bytes[i] ^ flip);
        check(bytes, "byte " + std::to_string(i) + " ^ " + std::to_string(flip));
      }
    }
    const int harmless_flips = harmless, name_flips = names;
    for (std::size_t n = 0; n < healthy.size(); n += step) check(healthy.substr(0, n), "cut at " + std::to_string(n));
    EXPECT_EQ(harmless, harmless_flips);  // bytes after a pickle's end are ignored
    EXPECT_EQ(names, name_flips);
    std::printf("%s: %d errors, %d harmless, %d other names\n", name.c_str(), errors, harmless, names);
  }
}

}  // namespace
}  // namespace reshard::metadata_damage_test
