// What both tools share: a clock, a socket, and a cutter that finds the ends of frames in a stream and keeps only
// their first bytes, so that frames of any size cost no memory.
//
//     frame   u32 little endian: bytes that follow | MessagePack array [number, id, ...]
//
// Our scripts write the kind of a request as its `id`, so that the echo can tell requests apart by two bytes.
#ifndef KVSLOT_FRAMES_H
#define KVSLOT_FRAMES_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_BYTES = 16, KINDS = 16 };

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void die(const char *what) {
    perror(what);
    exit(2);
}

static inline struct sockaddr_un address_of(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        fprintf(stderr, "socket path too long: %s\n", path);
        exit(2);
    }
    strcpy(address.sun_path, path);
    return address;
}

// Where in a stream of frames we are.
typedef struct {
    uint8_t head[HEAD_BYTES];  // the first bytes of the present frame, its length included
    uint32_t seen;             // bytes of it that have passed
    uint32_t size;             // its whole length, known once `seen` >= 4
} cutter;

// Lets up to `count` bytes at `data` pass; stops behind the end of a frame.  Returns the bytes taken; *whole says
// whether a frame ended there (the next call begins another).
static inline size_t cut(cutter *c, const uint8_t *data, size_t count, int *whole) {
    size_t taken = 0;
    *whole = 0;
    if (c->size && c->seen == c->size) c->seen = c->size = 0;
    while (taken < count && c->seen < 4) {
        c->head[c->seen++] = data[taken++];
    }
    if (c->seen < 4) return taken;
    if (!c->size) {
        uint32_t body;
        memcpy(&body, c->head, 4);
        if (!body || body > (64u << 20)) {
            fprintf(stderr, "a frame of %u bytes\n", body);
            exit(3);
        }
        c->size = body + 4;
    }
    size_t rest = c->size - c->seen, more = count - taken < rest ? count - taken : rest;
    if (c->seen < HEAD_BYTES && more) {
        size_t kept = HEAD_BYTES - c->seen < more ? HEAD_BYTES - c->seen : more;
        memcpy(c->head + c->seen, data + taken, kept);
    }
    c->seen += (uint32_t)more;
    taken += more;
    *whole = c->seen == c->size;
    return taken;
}

// Where the message's number stands in a frame: behind the array's own one or three bytes.
static inline int number_at(const uint8_t *head) { return head[4] == 0xdc ? 7 : 5; }

#endif
